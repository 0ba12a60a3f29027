//! A filesystem in a file that lasts: what a volume is on this host.
//!
//! ```text
//!   image (sparse file) ── loop device ── ext4 with journal ── mountpoint
//! ```
//!
//! Invariants: an image never has two loop devices, so the kernel knows its filesystem once, however often it is
//! mounted; it has a loop device or a program that works on it, never both, also if the program outlives the process that
//! started it: whoever has it locks the file; what was synced inside is on the disk; nothing here shrinks; a frozen
//! filesystem thaws, also if its copy fails or hangs. All functions block.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{FlockOperation, SeekFrom, flock, seek};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tokio::time::Instant;

use crate::loop_device::{self, LoopDevice};
use crate::scratch::device_at;
use crate::{program, template};

/// With a journal, without a reserve for root. The file is sparse, so what is not written reads as zeros.
const FORMAT: [&str; 7] =
    ["-q", "-F", "-m", "0", "-b4096", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"];
/// Freed blocks go back to the host; a broken filesystem is not written to.
const OPTIONS: &str = "discard,noinit_itable,errors=remount-ro";
/// A check of some hundred gigabytes; small ones take milliseconds. What it has not mended then it mends next time.
const CHECK_DEADLINE: Duration = Duration::from_secs(600);
/// For a program that an earlier daemon left at work.
const LOCK_DEADLINE: Duration = Duration::from_secs(60);
/// The end of the name of a file beside the image, which is there while it is grown unmounted: if it still is
/// when it is mounted, that was not finished.
const GROWING: &str = "growing";
/// Somebody who looks into the directory is gone again within this time.
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);
/// Bytes that the kernel copies at once.
const COPY_MAX: usize = 64 << 20;

const FIFREEZE: u64 = 0xC004_5877;
const FITHAW: u64 = 0xC004_5878;
const EXT4_IOC_RESIZE_FS: u64 = 0x4008_6610;
/// Bytes of a block of ours.
const BLOCK: u64 = 4096;

/// What a volume has and holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Without what the filesystem needs for itself.
    pub bytes: u64,
    pub used_bytes: u64,
}

/// An image and where it is mounted, if it is. Dropping it changes nothing on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeImage {
    file: PathBuf,
    mountpoint: PathBuf,
}

impl VolumeImage {
    /// One that is there.
    pub fn at(file: &Path, mountpoint: &Path) -> Self {
        Self { file: file.to_owned(), mountpoint: mountpoint.to_owned() }
    }

    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Makes an empty filesystem of this size in a new file, durably.
    pub fn format(file: &Path, size_mib: u64) -> io::Result<()> {
        let file = new_file(file)?;
        file.set_len(template::bytes_of(size_mib)?)?;
        template::make_filesystem(&file, &FORMAT)?;
        file.sync_all()
    }

    /// Mounts it, unless it is. A mount of an earlier daemon is taken over, and thawed if it died meanwhile.
    pub fn mount(&self) -> io::Result<()> {
        if self.mounted()? {
            return thaw(&File::open(&self.mountpoint)?);
        }
        match fs::create_dir(&self.mountpoint) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let device = match loop_device::of(&self.file)? {
            Some(device) => device,
            None => self.attach()?,
        };
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOATIME;
        let options = CString::new(OPTIONS).expect("no zero byte");
        mount(device.path(), &self.mountpoint, "ext4", flags, options.as_c_str())?;
        thaw(&File::open(&self.mountpoint)?)?;
        // Programs that want an empty directory find one; it stays if something is in it.
        let _ = fs::remove_dir(self.mountpoint.join("lost+found"));
        Ok(())
    }

    /// Gives it a device, which keeps its lock.
    fn attach(&self) -> io::Result<LoopDevice> {
        let file = self.lock()?;
        if let Some(device) = loop_device::of(&self.file)? {
            return Ok(device);
        }
        if self.growing().exists() {
            tracing::warn!(image = %self.file.display(), "its growth was interrupted: it is checked");
            self.check_locked(&file)?;
            fs::remove_file(self.growing())?;
        }
        loop_device::attach(&file)
    }

    /// Whether this image is mounted at its place.
    pub fn mounted(&self) -> io::Result<bool> {
        let Some(device) = device_at(&self.mountpoint)? else { return Ok(false) };
        if loop_device::backing_file(&device).as_deref() == Some(&self.file) {
            return Ok(true);
        }
        let words = format!("something else is mounted at {}", self.mountpoint.display());
        Err(io::Error::new(ErrorKind::AlreadyExists, words))
    }

    /// Whether the kernel has it open: mounted here or, for somebody else, elsewhere.
    pub fn in_use(&self) -> io::Result<bool> {
        Ok(loop_device::of(&self.file)?.is_some())
    }

    /// Unmounts it here. Mounts of it elsewhere stay. Refused while somebody is in it.
    pub fn unmount(&self) -> io::Result<()> {
        let deadline = Instant::now() + UNMOUNT_DEADLINE;
        loop {
            match unmount(&self.mountpoint, UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                Err(Errno::INVAL | Errno::NOENT) => break,
                Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                Err(error) => return Err(error.into()),
            }
        }
        crate::directory::absent(fs::remove_dir(&self.mountpoint))
    }

    /// The same of what nobody needs any more: whoever is in it is left with what it has open.
    pub fn unmount_lazily(&self) -> io::Result<()> {
        if device_at(&self.mountpoint)?.is_some() {
            // What is frozen would be so for ever.
            thaw(&File::open(&self.mountpoint)?)?;
        }
        loop {
            match unmount(&self.mountpoint, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH) {
                Ok(()) => {}
                Err(Errno::INVAL | Errno::NOENT) => break,
                Err(error) => return Err(error.into()),
            }
        }
        crate::directory::absent(fs::remove_dir(&self.mountpoint))
    }

    /// Lets a filesystem go on that a daemon froze and died.
    pub fn thaw(&self) -> io::Result<()> {
        match self.mounted()? {
            true => thaw(&File::open(&self.mountpoint)?),
            false => Ok(()),
        }
    }

    /// Waits until the kernel has let go of it; false: somebody holds it.
    pub fn released(&self) -> io::Result<bool> {
        let deadline = Instant::now() + UNMOUNT_DEADLINE;
        while self.in_use()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(true)
    }

    pub fn size_mib(&self) -> io::Result<u64> {
        Ok(fs::metadata(&self.file)?.len() >> 20)
    }

    /// What it takes of the host's disk.
    pub fn stored_bytes(&self) -> io::Result<u64> {
        Ok(fs::metadata(&self.file)?.blocks().saturating_mul(512))
    }

    /// What is in it: as the kernel says if it is mounted, else as it was when it was last.
    pub fn usage(&self) -> io::Result<Usage> {
        if self.mounted()? {
            let fs = rustix::fs::statvfs(&self.mountpoint)?;
            let of = |blocks: u64| blocks.saturating_mul(fs.f_frsize);
            let used_bytes = of(fs.f_blocks.saturating_sub(fs.f_bfree));
            return Ok(Usage { bytes: of(fs.f_blocks), used_bytes });
        }
        Ok(superblock(&File::open(&self.file)?)?.usage)
    }

    /// A copy of this moment, in a new file, durably. The filesystem must be mounted; who writes to it waits meanwhile,
    /// for at most this long. `copied` is called before it goes on.
    pub fn copy(&self, to: &Path, within: Duration, copied: impl FnOnce()) -> io::Result<()> {
        let (from, to) = (File::open(&self.file)?, new_file(to)?);
        let frozen = Frozen::new(&self.mountpoint, within)?;
        copy_sparsely(&from, &to)?;
        copied();
        frozen.thaw()?;
        to.sync_all()
    }

    /// Gives the file more room; the filesystem does not know yet.
    pub fn lengthen(&self, size_mib: u64) -> io::Result<()> {
        let (bytes, file) =
            (template::bytes_of(size_mib)?, OpenOptions::new().write(true).open(&self.file)?);
        if bytes > file.metadata()?.len() {
            file.set_len(bytes)?;
            file.sync_all()?;
        }
        Ok(())
    }

    /// The same for the device of a mounted one.
    pub fn grow_device(&self) -> io::Result<()> {
        let device = loop_device::of(&self.file)?.ok_or(ErrorKind::NotFound)?;
        loop_device::grow(&device)
    }

    /// Has the mounted filesystem take this much of its device. An error: the kernel does not do this while it is
    /// mounted, or it has more.
    pub fn grow_mounted(&self, size_mib: u64) -> io::Result<()> {
        let blocks = template::bytes_of(size_mib)? / BLOCK;
        control(&File::open(&self.mountpoint)?, EXT4_IOC_RESIZE_FS, (&raw const blocks).cast())
    }

    /// Gives the filesystem more room; what it has then, which is more if an earlier growth was not recorded. It must be
    /// mounted nowhere.
    pub fn grow_unmounted(&self, size_mib: u64) -> io::Result<u64> {
        let lock = self.lock()?;
        self.check_locked(&lock)?;
        let has_mib = superblock(&lock)?.whole_bytes >> 20;
        if has_mib >= size_mib {
            return Ok(has_mib);
        }
        self.lengthen(size_mib)?;
        File::create(self.growing())?.sync_all()?;
        sync_parent(&self.file)?;
        // By its size: the file may be longer, if a growth was given up. It has no deadline: half of it is none.
        let grow = &mut Command::new("resize2fs");
        let grow = grow.arg(&self.file).arg(format!("{size_mib}M")).stdin(inherited(&lock)?);
        program::run(grow, None, &[0])?;
        lock.sync_all()?;
        fs::remove_file(self.growing())?;
        Ok(size_mib)
    }

    /// Checks it, and mends what can be mended without loss. It must be mounted nowhere.
    pub fn check(&self) -> io::Result<()> {
        self.check_locked(&self.lock()?)
    }

    fn check_locked(&self, lock: &File) -> io::Result<()> {
        // 1: errors were found and corrected.
        let check = &mut Command::new("e2fsck");
        let check = check.args(["-f", "-p"]).arg(&self.file).stdin(inherited(lock)?);
        program::run(check, Some(CHECK_DEADLINE), &[0, 1])
    }

    fn growing(&self) -> PathBuf {
        self.file.with_extension(GROWING)
    }

    /// The image, open, for who alone may have it. A loop device and a program keep the lock when this process ends.
    fn lock(&self) -> io::Result<File> {
        let file = OpenOptions::new().read(true).write(true).open(&self.file)?;
        let deadline = Instant::now() + LOCK_DEADLINE;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => {
                    let words =
                        "a check or growth of it that was begun earlier has not ended: ask again";
                    return Err(io::Error::new(ErrorKind::ResourceBusy, words));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Images with a loop device, below a directory.
pub fn images_in_use(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let devices = fs::read_dir("/sys/block")?.flatten();
    let files = devices
        .filter_map(|entry| loop_device::backing_file(&Path::new("/dev").join(entry.file_name())));
    Ok(files.filter(|file| file.starts_with(directory)).collect())
}

// === Steps ===

/// For a program that is to hold the lock as long as it works. It reads nothing.
fn inherited(lock: &File) -> io::Result<Stdio> {
    Ok(Stdio::from(lock.try_clone()?))
}

fn sync_parent(file: &Path) -> io::Result<()> {
    file.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// A filesystem that stands still; it goes on with this value, and by itself after a while.
struct Frozen {
    directory: File,
    /// Dropped: the thread that watches has nothing to do any more.
    done: Option<mpsc::Sender<()>>,
    watch: Option<std::thread::JoinHandle<()>>,
}

impl Frozen {
    fn new(mountpoint: &Path, within: Duration) -> io::Result<Self> {
        let directory = File::open(mountpoint)?;
        let watched = directory.try_clone()?;
        let (done, ended) = mpsc::channel();
        control(&directory, FIFREEZE, std::ptr::null())?;
        let watch = std::thread::spawn(move || {
            if ended.recv_timeout(within) == Err(mpsc::RecvTimeoutError::Timeout) {
                tracing::error!("the copy of a volume takes too long: its users go on");
                let _ = thaw(&watched);
            }
        });
        Ok(Self { directory, done: Some(done), watch: Some(watch) })
    }

    /// An error: it went on before, so what was copied may not fit together.
    fn thaw(mut self) -> io::Result<()> {
        self.end();
        match control(&self.directory, FITHAW, std::ptr::null()) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Err(io::Error::new(ErrorKind::TimedOut, "copying the volume takes too long"))
            }
            thawed => thawed,
        }
    }

    fn end(&mut self) {
        drop(self.done.take());
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.end();
        let _ = thaw(&self.directory);
    }
}

/// What is not frozen is fine.
fn thaw(directory: &File) -> io::Result<()> {
    match control(directory, FITHAW, std::ptr::null()) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        thawed => thawed,
    }
}

#[expect(unsafe_code, reason = "these ioctls have no safe wrapper")]
fn control(file: &File, what: u64, argument: *const libc::c_void) -> io::Result<()> {
    // SAFETY: the kernel reads at most the eight bytes behind `argument`, which the caller keeps, and keeps no pointer.
    match unsafe { libc::ioctl(file.as_raw_fd(), what as libc::Ioctl, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Shares the blocks if the filesystem of the host can; else holes stay holes.
fn copy_sparsely(from: &File, to: &File) -> io::Result<()> {
    let length = from.metadata()?.len();
    to.set_len(length)?;
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let mut at = 0;
    while at < length {
        let start = match seek(from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = seek(from, SeekFrom::Hole(start))?;
        copy_range(from, to, start, at)?;
    }
    Ok(())
}

fn copy_range(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let (mut read, mut written) = (start, start);
    while read < end {
        let rest = usize::try_from(end - read).unwrap_or(COPY_MAX).min(COPY_MAX);
        let copied =
            rustix::fs::copy_file_range(from, Some(&mut read), to, Some(&mut written), rest)?;
        if copied == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

/// What the filesystem's own description says.
struct Superblock {
    usage: Usage,
    /// With what it needs for itself.
    whole_bytes: u64,
}

fn superblock(image: &File) -> io::Result<Superblock> {
    const AT: u64 = 1024;
    const MAGIC: u16 = 0xEF53;
    let mut block = [0; 1024];
    image.read_exact_at(&mut block, AT)?;
    let half = |at: usize| u64::from(u32::from_le_bytes(std::array::from_fn(|n| block[at + n])));
    let whole = |low: usize, high: usize| half(low) | half(high) << 32;
    if u16::from_le_bytes([block[0x38], block[0x39]]) != MAGIC {
        return Err(io::Error::new(ErrorKind::InvalidData, "the image has no filesystem"));
    }
    let (all, free) = (whole(0x4, 0x150), whole(0xC, 0x158));
    let blocks = all.saturating_sub(half(0x248));
    let of = |blocks: u64| blocks.saturating_mul(1024 << half(0x18).min(6));
    let usage = Usage { bytes: of(blocks), used_bytes: of(blocks.saturating_sub(free)) };
    Ok(Superblock { usage, whole_bytes: of(all) })
}
