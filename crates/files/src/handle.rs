//! Names of files that the kernel gives, and their sealed form for guests.
//!
//! The kernel's own name says which inode of the file system it is, and which of its lives; a guest could guess one. So
//! what it gets has a code behind it, made with the key of its attachment.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use torpor_protocol::guest::files::{HANDLE_MAX, Handle};

use crate::service::KEY_LENGTH;

/// Bytes of the code: nobody guesses one of 2^128.
const CODE: usize = 16;
/// Bytes of a kernel's name that has room in a handle beside its kind and the code.
const ID_MAX: usize = HANDLE_MAX - CODE - 1;

/// What the kernel calls a file of one file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    kind: u8,
    length: u8,
    bytes: [u8; ID_MAX],
}

/// `struct file_handle` of the kernel, with room.
#[repr(C)]
struct Raw {
    length: u32,
    kind: i32,
    bytes: [u8; ID_MAX],
}

impl FileId {
    #[expect(unsafe_code, reason = "there is no safe form of this call")]
    pub(crate) fn of(file: impl AsFd) -> Result<Self, Errno> {
        let mut raw = Raw { length: ID_MAX as u32, kind: 0, bytes: [0; ID_MAX] };
        let mut mount = 0;
        let descriptor = file.as_fd().as_raw_fd();
        // SAFETY: the kernel writes at most as many bytes as `length` says, and one number.
        let named = unsafe {
            let raw = (&raw mut raw).cast();
            libc::name_to_handle_at(descriptor, c"".as_ptr(), raw, &mut mount, libc::AT_EMPTY_PATH)
        };
        if named < 0 {
            return Err(last_error());
        }
        let kind = u8::try_from(raw.kind).map_err(|_| Errno::OVERFLOW)?;
        let length = u8::try_from(raw.length).map_err(|_| Errno::OVERFLOW)?;
        Ok(Self { kind, length, bytes: raw.bytes })
    }

    /// Opens it in the file system that `root` is in; `ESTALE` if it is gone.
    #[expect(unsafe_code, reason = "there is no safe form of this call")]
    pub(crate) fn open(&self, root: impl AsFd, flags: OFlags) -> Result<OwnedFd, Errno> {
        let mut raw = Raw { length: self.length.into(), kind: self.kind.into(), bytes: self.bytes };
        let flags = (flags | OFlags::CLOEXEC | OFlags::NOFOLLOW).bits().cast_signed();
        let root = root.as_fd().as_raw_fd();
        // SAFETY: the kernel reads as many bytes as `length` says, which are there.
        let opened = unsafe { libc::open_by_handle_at(root, (&raw mut raw).cast(), flags) };
        if opened < 0 {
            return Err(last_error());
        }
        // SAFETY: the kernel just made this descriptor, and nobody else knows of it.
        Ok(unsafe { OwnedFd::from_raw_fd(opened) })
    }

    fn parts(&self) -> impl Iterator<Item = u8> {
        std::iter::once(self.kind).chain(self.bytes[..usize::from(self.length)].iter().copied())
    }

    /// As the name of a file.
    pub(crate) fn hex(&self) -> String {
        self.parts().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(crate) fn seal(&self, key: &[u8; KEY_LENGTH]) -> Result<Handle, Errno> {
        let mut bytes: Vec<u8> = self.parts().collect();
        let code = code(key, &bytes);
        bytes.extend_from_slice(&code);
        Handle::new(&bytes).map_err(|_| Errno::OVERFLOW)
    }

    /// What the handle names, if we made it; else it names nothing.
    pub(crate) fn unseal(key: &[u8; KEY_LENGTH], handle: &Handle) -> Result<Self, Errno> {
        let (content, said) = handle.as_bytes().split_last_chunk::<CODE>().ok_or(Errno::STALE)?;
        // In the same time wherever they differ.
        let differ = code(key, content).iter().zip(said).fold(0, |all, (a, b)| all | (a ^ b));
        let (kind, name) = content.split_first().ok_or(Errno::STALE)?;
        let mut bytes = [0; ID_MAX];
        let room = bytes.get_mut(..name.len()).ok_or(Errno::STALE)?;
        if differ != 0 {
            return Err(Errno::STALE);
        }
        room.copy_from_slice(name);
        let length = u8::try_from(name.len()).map_err(|_| Errno::STALE)?;
        Ok(Self { kind: *kind, length, bytes })
    }
}

fn code(key: &[u8; KEY_LENGTH], content: &[u8]) -> [u8; CODE] {
    let hash = blake3::keyed_hash(key, content);
    let mut code = [0; CODE];
    code.copy_from_slice(&hash.as_bytes()[..CODE]);
    code
}

pub(crate) fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
