//! Files of volumes for guests that have them over their channel.
//!
//! A guest names files by handles that are sealed with a key, made from the volume's and the folder that is attached. The
//! volume's is made once, by whoever attaches first, and goes with its copies: a guest that was forked has the handles of
//! before. It lies beside the image, where no guest reads.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::Semaphore;
use torpor_files::{Access, FileService, KEY_LENGTH};
use torpor_lifecycle::guest::FileServer;
use torpor_lifecycle::store::{OpenVolume, StoreError};
use torpor_protocol::{GuestPath, VolumeId};

use crate::{VolumeStore, blocking};

/// The name of the key in a volume's directory.
const KEY: &str = "key";

/// One attachment, which keeps its volume mounted.
struct Attached {
    // Dropped before the volume is let go.
    service: FileService,
    _volume: Arc<OpenVolume>,
}

impl FileServer for Attached {
    fn call(&self, message: &[u8]) -> Vec<u8> {
        self.service.serve(message)
    }

    fn turns(&self) -> Arc<Semaphore> {
        Arc::clone(self.service.volume().turns())
    }
}

impl VolumeStore {
    pub(crate) async fn attached(
        &self,
        volume: &Arc<OpenVolume>,
        below: &GuestPath,
        read_only: bool,
    ) -> Result<Arc<dyn FileServer>, StoreError> {
        let key = self.directory(&volume.id).join(KEY);
        let (store, volume, below) = (self.clone(), Arc::clone(volume), below.clone());
        blocking("serve the files of a volume", move || {
            let key = key_of(&key)?;
            // One for all who have it here: they see each other's locks and removals.
            let files = store.files(&volume.id, &volume.dir)?;
            let subpath = Path::new(below.relative());
            let service = files.attach(subpath, Access { read_only, key })?;
            Ok(Arc::new(Attached { service, _volume: volume }) as Arc<dyn FileServer>)
        })
        .await
    }

    fn files(&self, id: &VolumeId, dir: &Path) -> io::Result<Arc<torpor_files::Volume>> {
        let used = self.used(id);
        let mut files = used.files.lock();
        if let Some(files) = files.upgrade() {
            return Ok(files);
        }
        let opened = torpor_files::Volume::open(dir)?;
        *files = Arc::downgrade(&opened);
        Ok(opened)
    }
}

/// Brings the key of a volume along with a copy of it.
pub(crate) fn copy_key(from: &Path, to: &Path) -> io::Result<()> {
    match fs::read(from.join(KEY)) {
        Ok(key) => write(&to.join(KEY), &key),
        // No guest had a handle yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// The key in this file, which is made if there is none. Of several who make one at a time the first wins.
fn key_of(file: &Path) -> io::Result<[u8; KEY_LENGTH]> {
    match read_key(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    let mut random = [0; KEY_LENGTH + 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let (key, number) = random.split_at(KEY_LENGTH);
    let number: String = number.iter().map(|byte| format!("{byte:02x}")).collect();
    // Of its own, so that nobody finds half of one.
    let fresh = file.with_extension(number);
    let linked = write(&fresh, key).and_then(|()| fs::hard_link(&fresh, file));
    fs::remove_file(&fresh)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    file.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())?;
    read_key(file)
}

fn read_key(file: &Path) -> io::Result<[u8; KEY_LENGTH]> {
    fs::read(file)?.try_into().map_err(|_| io::ErrorKind::InvalidData.into())
}

fn write(path: &Path, key: &[u8]) -> io::Result<()> {
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(key)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_who_attach_a_fresh_volume_at_once_have_the_same_key() {
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join(KEY);
            let start = std::sync::Barrier::new(8);
            let attach = || {
                start.wait();
                key_of(&file).unwrap()
            };
            let keys: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(attach)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let later = key_of(&file).unwrap();
            assert!(keys.iter().all(|key| *key == later));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left");
        }
    }
}
