//! The operator's own certificate, in two files that somebody else renews.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, RwLock};
use torpor_lifecycle::chain;

use super::TlsError;
use super::held::Held;

/// Largest file that is read: a chain of certificates is a few kilobytes.
const FILE_MAX: u64 = 1024 * 1024;

/// Tells two versions of a file apart.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp(Vec<(u64, i64, i64, u64)>);

pub(super) struct Fixed {
    certificate: PathBuf,
    key: PathBuf,
    held: RwLock<Held>,
    seen: Mutex<Option<Stamp>>,
}

impl Fixed {
    pub(super) fn open(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let seen = stamp(certificate, key);
        let held = RwLock::new(read(certificate, key)?);
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        Ok(Self { certificate, key, held, seen: Mutex::new(seen) })
    }

    pub(super) fn held(&self) -> Held {
        self.held.read().clone()
    }

    /// Reads the files again, if they changed or somebody insists. What can't be used is complained
    /// about, and what was there before is served on.
    pub(super) fn reload(&self, insist: bool) {
        let stamp = stamp(&self.certificate, &self.key);
        if !insist && (stamp.is_none() || stamp == *self.seen.lock()) {
            return;
        }
        let path = self.certificate.display();
        match read(&self.certificate, &self.key) {
            Ok(held) => {
                *self.held.write() = held;
                tracing::info!(%path, "the certificate was read again");
            }
            // Also while one of the two files is new and the other is not.
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(%path, error, "the new certificate can't be used, the old one stays");
            }
        }
        *self.seen.lock() = stamp;
    }
}

fn stamp(certificate: &Path, key: &Path) -> Option<Stamp> {
    let of = |data: Metadata| (data.ino(), data.mtime(), data.mtime_nsec(), data.size());
    let stamps = [certificate, key].into_iter().map(|path| path.metadata().map(of));
    stamps.collect::<Result<_, _>>().ok().map(Stamp)
}

fn read(certificate: &Path, key: &Path) -> Result<Held, TlsError> {
    let bytes = |path: &Path| -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(FILE_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = |path: &Path| {
        bytes(path).map_err(|source| TlsError::Unreadable { path: path.to_owned(), source })
    };
    let (chain, key) = (bytes(certificate)?, bytes(key)?);
    Held::parse(&chain, &key)
        .map_err(|source| TlsError::Certificate { path: certificate.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::held::tests::made;
    use crate::tls::validity::Validity;

    const YEAR: Validity =
        Validity { from_ms: 1_700_000_000_000, until_ms: 1_700_000_000_000 + 31_536_000_000 };

    #[test]
    fn new_files_are_served_and_bad_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (chain_file, key_file) = (dir.path().join("chain"), dir.path().join("key"));
        let put = |names: &[&str]| {
            let (chain, key) = made(names, YEAR);
            std::fs::write(&chain_file, chain).unwrap();
            std::fs::write(&key_file, key).unwrap();
        };
        put(&["old.example.org"]);
        let fixed = Fixed::open(&chain_file, &key_file).unwrap();
        assert!(fixed.held().covers("old.example.org"));
        put(&["a-new-name.example.org"]);
        fixed.reload(false);
        assert!(fixed.held().covers("a-new-name.example.org"));
        // Half of a change, nonsense, nothing.
        std::fs::write(&key_file, made(&["x.example.org"], YEAR).1).unwrap();
        fixed.reload(false);
        std::fs::write(&chain_file, "nonsense").unwrap();
        fixed.reload(true);
        std::fs::remove_file(&chain_file).unwrap();
        fixed.reload(false);
        fixed.reload(true);
        assert!(fixed.held().covers("a-new-name.example.org"));
        put(&["third.example.org"]);
        fixed.reload(false);
        assert!(fixed.held().covers("third.example.org"));
    }

    #[test]
    fn a_daemon_does_not_start_with_a_certificate_that_it_can_not_serve() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let error = Fixed::open(&missing, &missing).err().unwrap().to_string();
        assert!(error.contains("missing"), "{error}");
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(Fixed::open(&file, &file).is_err());
    }
}
