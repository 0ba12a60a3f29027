//! Files of volumes for guests that have them over their channel.
//!
//! A guest names files by handles that are sealed with a key. The key is the volume's, and goes with its copies: a guest
//! that was forked has the handles of before. It lies beside the image, where no guest reads.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

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

/// The key in this file, which is made if there is none.
fn key_of(file: &Path) -> io::Result<[u8; KEY_LENGTH]> {
    match fs::read(file) {
        Ok(key) => key.try_into().map_err(|_| io::ErrorKind::InvalidData.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut key = [0; KEY_LENGTH];
            getrandom::fill(&mut key).map_err(io::Error::other)?;
            let fresh = file.with_extension("new");
            write(&fresh, &key)?;
            fs::rename(fresh, file)?;
            file.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())?;
            Ok(key)
        }
        Err(error) => Err(error),
    }
}

fn write(path: &Path, key: &[u8]) -> io::Result<()> {
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(key)?;
    file.sync_all()
}
