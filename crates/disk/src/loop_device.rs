//! Loop devices: a file seen as a disk.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

/// Other programs take free devices too; so often in a row that we lose, something else is wrong.
const ATTEMPTS: usize = 1_000;

const LOOP_CONFIGURE: u32 = 0x4C0A;
const LOOP_SET_CAPACITY: u32 = 0x4C07;
const LOOP_CTL_GET_FREE: u32 = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// Threads of this process ask for a free device one after the other; else all get the same
/// answer and all but one ask again.
static TURN: Mutex<()> = Mutex::new(());

/// An attached device. It detaches itself when this and every mount of it are gone.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    path: PathBuf,
    open: File,
}

impl LoopDevice {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// `struct loop_info64` of the kernel.
#[repr(C)]
struct Description {
    numbers: [u64; 5],
    number: u32,
    encryption: [u32; 2],
    flags: u32,
    names: [[u8; 64]; 2],
    key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of the kernel.
#[repr(C)]
struct Configuration {
    file: u32,
    block_size: u32,
    description: Description,
    reserved: [u64; 8],
}

/// Gives `image` a device.
pub(crate) fn attach(image: &File) -> io::Result<LoopDevice> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
    for _ in 0..ATTEMPTS {
        let _turn = TURN.lock();
        let number = simple(&control, LOOP_CTL_GET_FREE)?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = match OpenOptions::new().read(true).write(true).open(&path) {
            // Removed by somebody between the two calls.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => continue,
            device => device?,
        };
        match configure(&device, image.as_raw_fd()) {
            Ok(()) => return Ok(LoopDevice { path, open: device }),
            // Another process was faster.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "no loop device stays free"))
}

/// The device that this file has already, held: it stays while the value lives, and so does what is mounted of it.
pub(crate) fn of(image: &Path) -> io::Result<Option<LoopDevice>> {
    for entry in fs::read_dir("/sys/block")? {
        let path = Path::new("/dev").join(entry?.file_name());
        if backing_file(&path).as_deref() != Some(image) {
            continue;
        }
        let Ok(device) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
        // It may have been given away before it was open.
        if backing_file(&path).as_deref() == Some(image) {
            return Ok(Some(LoopDevice { path, open: device }));
        }
    }
    Ok(None)
}

/// The file has grown: so does the device.
pub(crate) fn grow(device: &LoopDevice) -> io::Result<()> {
    simple(&device.open, LOOP_SET_CAPACITY).map(drop)
}

/// The file behind a device, if it has one.
pub(crate) fn backing_file(device: &Path) -> Option<PathBuf> {
    let number = number(device)?;
    let file = fs::read_to_string(format!("/sys/block/loop{number}/loop/backing_file")).ok()?;
    let file = file.trim_end_matches('\n');
    Some(PathBuf::from(file.strip_suffix(" (deleted)").unwrap_or(file)))
}

/// 7 of `/dev/loop7`.
pub(crate) fn number(device: &Path) -> Option<u32> {
    device.to_str()?.strip_prefix("/dev/loop")?.parse().ok()
}

/// A call without an argument.
#[expect(unsafe_code, reason = "these ioctls have no safe wrapper")]
fn simple(file: &File, what: u32) -> io::Result<i32> {
    // SAFETY: the call takes no argument and touches no memory of ours.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(what)) } {
        -1 => Err(io::Error::last_os_error()),
        number => Ok(number),
    }
}

#[expect(unsafe_code, reason = "this ioctl has no safe wrapper")]
fn configure(device: &File, image: RawFd) -> io::Result<()> {
    let configuration = Configuration {
        file: image.cast_unsigned(),
        block_size: 0,
        description: Description {
            numbers: [0; 5],
            number: 0,
            encryption: [0; 2],
            flags: LO_FLAGS_AUTOCLEAR,
            names: [[0; 64]; 2],
            key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: the kernel reads one `struct loop_config`, of the same layout, and keeps no pointer.
    let done = unsafe {
        libc::ioctl(device.as_raw_fd(), libc::Ioctl::from(LOOP_CONFIGURE), &raw const configuration)
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
