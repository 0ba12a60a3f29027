//! Certificates with their keys, and what is needed to get more: one small private file each, in a
//! directory of its own.
//!
//! - A file is replaced as a whole or not at all, and nobody else can read it at any instant.
//! - The name of a file is made from the name of a host, in which nothing can lead elsewhere.

use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use torpor_lifecycle::store::StoreError;

use crate::{Layout, files};

/// Largest file that is read: a chain of certificates is a few kilobytes.
const FILE_MAX: u64 = 256 * 1024;
/// Longest name that is kept: a host name, with room for what we put before it.
const NAME_MAX: usize = 253;
/// What stands for the star of a wildcard: no host name contains it.
const STAR: &str = "_wildcard";

/// What kind of file something is kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateFile {
    /// A key and the chain of its certificate (PEM).
    Certificate,
    /// How asking for a certificate went the last time (JSON).
    Attempt,
    /// An account at whoever gives certificates (JSON).
    Account,
}

impl CertificateFile {
    fn ending(self) -> &'static str {
        match self {
            Self::Certificate => "pem",
            Self::Attempt => "attempt",
            Self::Account => "account",
        }
    }
}

/// The certificates of a data directory.
#[derive(Debug, Clone)]
pub struct Certificates {
    dir: PathBuf,
}

impl Certificates {
    /// Opens or creates the directory below a data directory.
    pub fn open(data_dir: &Path) -> Result<Self, StoreError> {
        let dir = Layout::certificates(data_dir);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        made.map_err(files::failed("create the directory of certificates"))?;
        Ok(Self { dir })
    }

    /// What is kept under a name, if there is something.
    pub fn get(&self, kind: CertificateFile, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let action = "read a file of certificates";
        let file = match File::open(self.path(kind, name)?) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(files::failed(action)(error)),
        };
        let mut bytes = Vec::new();
        file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(files::failed(action))?;
        if bytes.len() as u64 > FILE_MAX {
            return Err(StoreError::failed(action)(format!("{name} is longer than {FILE_MAX}")));
        }
        Ok(Some(bytes))
    }

    /// Replaces what is kept under a name, durably.
    pub fn put(&self, kind: CertificateFile, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let written = files::write_private(&self.path(kind, name)?, bytes);
        written.map_err(files::failed("write a file of certificates"))
    }

    /// What is not there is fine.
    pub fn remove(&self, kind: CertificateFile, name: &str) -> Result<(), StoreError> {
        match std::fs::remove_file(self.path(kind, name)?) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(files::failed("remove a file of certificates")(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Names under which something of that kind is kept, sorted.
    pub fn names(&self, kind: CertificateFile) -> Result<Vec<String>, StoreError> {
        let action = "list the certificates";
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.dir).map_err(files::failed(action))? {
            let file = entry.map_err(files::failed(action))?.file_name();
            let Some(file) = file.to_str() else { continue };
            let Some(stem) = file.strip_suffix(kind.ending()) else { continue };
            let Some(stem) = stem.strip_suffix('.') else { continue };
            let name = match stem.strip_prefix(STAR) {
                Some(rest) => format!("*{rest}"),
                None => stem.to_owned(),
            };
            if is_plain(&name) {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn path(&self, kind: CertificateFile, name: &str) -> Result<PathBuf, StoreError> {
        if !is_plain(name) {
            let shown: String = name.chars().take(80).collect();
            return Err(StoreError::Invalid(format!("{shown:?} is no name of a certificate")));
        }
        let stem = match name.strip_prefix('*') {
            Some(rest) => format!("{STAR}{rest}"),
            None => name.to_owned(),
        };
        Ok(self.dir.join(format!("{stem}.{}", kind.ending())))
    }
}

/// A host name in small letters, perhaps with a star as its first label.
fn is_plain(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let host = name.strip_prefix("*.").unwrap_or(name);
    name.len() <= NAME_MAX
        && host.split('.').all(|label| !label.is_empty() && label.bytes().all(plain))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn kept() -> (tempfile::TempDir, Certificates) {
        let dir = tempfile::tempdir().unwrap();
        let certificates = Certificates::open(dir.path()).unwrap();
        (dir, certificates)
    }

    #[test]
    fn what_is_kept_is_found_again_and_private() {
        let (dir, certificates) = kept();
        for name in ["a.example.org", "*.example.org", "example.org"] {
            certificates.put(CertificateFile::Certificate, name, name.as_bytes()).unwrap();
        }
        certificates.put(CertificateFile::Attempt, "b.example.org", b"{}").unwrap();
        let again = Certificates::open(dir.path()).unwrap();
        let names = again.names(CertificateFile::Certificate).unwrap();
        assert_eq!(names, ["*.example.org", "a.example.org", "example.org"]);
        let star = again.get(CertificateFile::Certificate, "*.example.org").unwrap().unwrap();
        assert_eq!(star, b"*.example.org");
        for entry in std::fs::read_dir(&again.dir).unwrap() {
            let mode = entry.unwrap().metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        again.remove(CertificateFile::Certificate, "*.example.org").unwrap();
        assert_eq!(again.get(CertificateFile::Certificate, "*.example.org").unwrap(), None);
    }

    #[test]
    fn a_name_never_leads_out_of_the_directory() {
        let (_dir, certificates) = kept();
        for name in [
            "",
            ".",
            "..",
            "../a",
            "a/b",
            "a\0b",
            "A.example.org",
            "a..b",
            "*",
            "a.*.b",
            "_wildcard.b",
        ] {
            assert!(certificates.put(CertificateFile::Account, name, b"x").is_err(), "{name:?}");
            assert!(certificates.get(CertificateFile::Account, name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_draft_that_a_crash_left_is_no_certificate() {
        let (_dir, certificates) = kept();
        std::fs::write(certificates.dir.join("a.example.org.draft"), "half").unwrap();
        assert!(certificates.names(CertificateFile::Certificate).unwrap().is_empty());
        assert_eq!(certificates.get(CertificateFile::Certificate, "a.example.org").unwrap(), None);
    }

    #[test]
    fn a_huge_file_is_refused_instead_of_read() {
        let (_dir, certificates) = kept();
        let huge = vec![b'x'; usize::try_from(FILE_MAX).unwrap() + 1];
        std::fs::write(certificates.dir.join("a.example.org.pem"), huge).unwrap();
        assert!(certificates.get(CertificateFile::Certificate, "a.example.org").is_err());
    }
}
