//! A disk of its own for a test, and a guest that calls.

use std::borrow::Cow;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;
use torpor_files::{Access, FileService, Volume};
use torpor_protocol::guest::files::{
    Answer, Attributes, Call, Handle, Name, Owner, PREFIX, decode_answer, encode_call,
};

pub(crate) const ROOT: Owner = Owner { user: 0, group: 0 };

/// A small ext4 in a file, mounted where only this test sees it: it goes away with the test, however that ends.
pub(crate) struct Disk {
    directory: tempfile::TempDir,
}

impl Disk {
    pub(crate) fn new(mib: u64) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            torpor_testkit::missing("disks need root and loop devices");
            return None;
        }
        own_mounts();
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(mib << 20).unwrap();
        std::fs::create_dir(directory.path().join("mnt")).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "root_owner=0:0"]).arg(&image));
        let disk = Self { directory };
        let mut mount = Command::new("mount");
        run(mount.args(["-o", "loop,nosuid,nodev"]).arg(&image).arg(disk.path()));
        Some(disk)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }

    /// A place beside the disk.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn volume(&self) -> Arc<Volume> {
        Volume::open(&self.path()).unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.path(), UnmountFlags::DETACH);
    }
}

/// Mounts that this thread makes from now on, and those that it starts, are seen by nobody else.
#[expect(unsafe_code, reason = "a thread that gets mounts of its own")]
fn own_mounts() {
    // SAFETY: a new namespace of mounts takes no descriptors or memory from anybody.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", flags).unwrap();
}

pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn access(read_only: bool) -> Access {
    Access { read_only, key: [7; 32] }
}

pub(crate) fn name(name: &str) -> Name<'_> {
    Name::new(name.as_bytes()).unwrap()
}

/// Sends calls as they come over the wire.
pub(crate) struct Guest {
    pub(crate) service: Arc<FileService>,
    pub(crate) root: Handle,
    next: AtomicU64,
}

impl Guest {
    pub(crate) fn new(service: FileService) -> Self {
        let service = Arc::new(service);
        let (root, next) = (Handle::new(&[]).unwrap(), AtomicU64::new(1));
        let mut guest = Self { service, root, next };
        guest.root = guest.entry(&Call::Root {}).unwrap().0;
        guest
    }

    pub(crate) fn attached(disk: &Disk) -> Self {
        Self::new(disk.volume().attach(Path::new(""), access(false)).unwrap())
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn call(&self, call: &Call<'_>) -> Answer<'static> {
        self.send(self.sequence(), false, call)
    }

    pub(crate) fn send(&self, sequence: u64, again: bool, call: &Call<'_>) -> Answer<'static> {
        let mut message = Vec::new();
        encode_call(sequence, again, call, &mut message);
        let answer = self.service.serve(&message[PREFIX..]);
        let (to, answer) = decode_answer(&answer[PREFIX..]).unwrap();
        assert_eq!(to, sequence);
        owned(answer)
    }

    /// Nothing, or the number of the error.
    pub(crate) fn done(&self, call: &Call<'_>) -> Result<(), u32> {
        match self.call(call) {
            Answer::Failed { errno } => Err(errno),
            _ => Ok(()),
        }
    }

    pub(crate) fn entry(&self, call: &Call<'_>) -> Result<(Handle, Attributes), u32> {
        match self.call(call) {
            Answer::Entry { file, attributes } => Ok((file, attributes)),
            Answer::Failed { errno } => Err(errno),
            other => panic!("no entry but {other:?}"),
        }
    }

    pub(crate) fn lookup(&self, dir: Handle, file: &str) -> Result<Handle, u32> {
        Ok(self.entry(&Call::Lookup { dir, name: name(file) })?.0)
    }

    pub(crate) fn create(&self, dir: Handle, file: &str) -> Result<Handle, u32> {
        let (name, mode) = (name(file), 0o644);
        let (exclusive, truncate) = (true, false);
        Ok(self.entry(&Call::Create { dir, name, owner: ROOT, mode, exclusive, truncate })?.0)
    }

    pub(crate) fn mkdir(&self, dir: Handle, file: &str) -> Result<Handle, u32> {
        Ok(self.entry(&Call::Mkdir { dir, name: name(file), owner: ROOT, mode: 0o755 })?.0)
    }

    pub(crate) fn read(&self, file: Handle) -> Result<Vec<u8>, u32> {
        match self.call(&Call::Read { file, offset: 0, length: 1000 }) {
            Answer::Data { data } => Ok(data.into_owned()),
            Answer::Failed { errno } => Err(errno),
            other => panic!("no data but {other:?}"),
        }
    }

    pub(crate) fn write(&self, file: Handle, data: &[u8]) -> Result<(), u32> {
        let data = Cow::Borrowed(data);
        self.done(&Call::Write { file, offset: 0, append: false, strip: false, data })
    }

    pub(crate) fn names(&self, dir: Handle) -> Vec<String> {
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let Answer::Entries { end, entries } =
                self.call(&Call::Readdir { dir, cookie, length: 10_000 })
            else {
                panic!("no entries")
            };
            for entry in entries {
                cookie = entry.cookie;
                names.push(String::from_utf8_lossy(entry.name.as_bytes()).into_owned());
            }
            if end {
                names.sort();
                return names;
            }
        }
    }
}

/// An answer that borrows nothing.
fn owned(answer: Answer<'_>) -> Answer<'static> {
    let mut bytes = Vec::new();
    torpor_protocol::guest::files::Wire::put(&answer, &mut bytes);
    let mut bytes: &'static [u8] = bytes.leak();
    torpor_protocol::guest::files::Wire::take(&mut bytes).unwrap()
}

/// Whether nothing of ours holds the disk.
pub(crate) fn free(disk: &Disk) -> bool {
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let opened = rustix::fs::open(disk.path(), flags, rustix::fs::Mode::empty()).unwrap();
    let _ = opened.as_fd();
    drop(opened);
    rustix::mount::unmount(disk.path(), UnmountFlags::empty()).is_ok()
}
