//! The root file: one uncompressed EROFS filesystem.
//!
//! Made by `mkfs.erofs` with `-x-1` (no extended attributes) and `-E noinline_data` (file content in
//! whole blocks): gVisor supports neither attributes nor mapping of a packed tail. Times are kept:
//! Python compares those of its sources with what it compiled.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use blake3::Hasher;
use tokio::process::Command;
use torpor_lifecycle::store::StoreError;

use super::reader::{MAGIC, SUPERBLOCK};
use crate::files;

/// How long packing may take: 20 GiB at a slow disk's 40 MB/s, and then some.
const PACK_DEADLINE: Duration = Duration::from_secs(900);
/// The same tree should be the same bytes, so the filesystem gets no random identity.
const NO_UUID: &str = "00000000-0000-0000-0000-000000000000";
/// How much of a tool's complaint is passed on.
const COMPLAINT_MAX: usize = 2000;

/// Makes the root file of a staged tree, durable under its present name.
pub(crate) async fn pack(tree: &Path, file: &Path) -> Result<(), StoreError> {
    let mut command = Command::new("mkfs.erofs");
    command
        .args(["-x-1", "-E", "noinline_data", "--quiet", "-U", NO_UUID])
        .arg(file)
        .arg(tree)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PACK_DEADLINE, command.output()).await;
    let output = match output {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(tool_missing("mkfs.erofs")(error)),
        Err(_) => {
            let seconds = PACK_DEADLINE.as_secs();
            return Err(StoreError::failed("pack the image")(format!(
                "mkfs.erofs took longer than {seconds} s"
            )));
        }
    };
    if !output.status.success() {
        let said = complaint(&[output.stdout, output.stderr].concat());
        if said.contains("No space left on device") {
            return Err(StoreError::DiskFull("could not pack the image".to_owned()));
        }
        return Err(StoreError::failed("pack the image")(format!("mkfs.erofs failed: {said}")));
    }
    let file = file.to_owned();
    super::blocking(move || {
        let synced = File::open(&file).and_then(|file| file.sync_all());
        synced.map_err(files::failed("write the image to disk"))
    })
    .await
}

/// For `map_err` where a program of the host is started.
pub(crate) fn tool_missing(tool: &'static str) -> impl FnOnce(io::Error) -> StoreError {
    move |error| {
        if error.kind() == io::ErrorKind::NotFound {
            return StoreError::Invalid(format!("{tool} is not installed: run scripts/setup"));
        }
        files::failed(format!("run {tool}"))(error)
    }
}

/// The end of what a tool said.
pub(crate) fn complaint(said: &[u8]) -> String {
    let from = said.len().saturating_sub(COMPLAINT_MAX);
    String::from_utf8_lossy(&said[from..]).trim().to_owned()
}

/// Length and BLAKE3 hash of a file.
pub(crate) fn measure(path: &Path) -> io::Result<(u64, String)> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let hash = Hasher::new().update_reader(file)?.finalize();
    Ok((bytes, hash.to_hex().to_string()))
}

/// What a root file must be.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) hash: String,
}

impl Expected {
    /// Whether the file is there, as long as it was and of the right kind; `Err` says what is
    /// wrong. Takes microseconds.
    pub(crate) fn glance(&self) -> Result<(), String> {
        let shown = self.path.display();
        let file = File::open(&self.path).map_err(|error| format!("{shown}: {error}"))?;
        let bytes = file.metadata().map_err(|error| format!("{shown}: {error}"))?.len();
        if bytes != self.bytes {
            return Err(format!("{shown} has {bytes} bytes and had {}", self.bytes));
        }
        let mut magic = [0u8; 4];
        file.read_exact_at(&mut magic, SUPERBLOCK).map_err(|error| format!("{shown}: {error}"))?;
        if u32::from_le_bytes(magic) != MAGIC {
            return Err(format!("{shown} is no EROFS filesystem"));
        }
        Ok(())
    }

    /// Reads the whole file: about 0.2 s for 300 MB.
    pub(crate) fn verify(&self) -> Result<(), String> {
        self.glance()?;
        let shown = self.path.display();
        let (_, hash) = measure(&self.path).map_err(|error| format!("{shown}: {error}"))?;
        if hash != self.hash {
            return Err(format!("{shown} has BLAKE3 {hash} and had {}", self.hash));
        }
        Ok(())
    }
}
