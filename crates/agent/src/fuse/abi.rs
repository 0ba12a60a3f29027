//! The kernel's side of a mount: its requests taken apart, and replies put together.
//!
//! Numbers are of this machine, structures those of `linux/fuse.h`, version 7.38. What the kernel sends is parsed as
//! if it were not the kernel: a cut request is an error, and nothing else.

use rustix::io::Errno;
use torpor_protocol::guest::files::{Attributes, DATA_MAX, Time};

/// The version we speak, and the oldest that has all we need.
pub(super) const MAJOR: u32 = 7;
pub(super) const MINOR: u32 = 38;
pub(super) const MINOR_MIN: u32 = 31;
/// Bytes of the largest request: content, and all else.
pub(super) const REQUEST_MAX: usize = DATA_MAX + 8 * 1024;
pub(super) const ROOT: u64 = 1;

pub(super) mod init {
    //! What is negotiated at the beginning.
    pub(in super::super) const ASYNC_READ: u64 = 1 << 0;
    pub(in super::super) const POSIX_LOCKS: u64 = 1 << 1;
    pub(in super::super) const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub(in super::super) const BIG_WRITES: u64 = 1 << 5;
    pub(in super::super) const FLOCK_LOCKS: u64 = 1 << 10;
    pub(in super::super) const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub(in super::super) const DO_READDIRPLUS: u64 = 1 << 13;
    pub(in super::super) const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub(in super::super) const PARALLEL_DIROPS: u64 = 1 << 18;
    pub(in super::super) const MAX_PAGES: u64 = 1 << 22;
    pub(in super::super) const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub(in super::super) const INIT_EXT: u64 = 1 << 30;
    pub(in super::super) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

/// What is said of an open file.
pub(super) const FOPEN_DIRECT_IO: u32 = 1 << 0;
pub(super) const FOPEN_KEEP_CACHE: u32 = 1 << 1;
pub(super) const OPEN_KILL_SUIDGID: u32 = 1 << 0;
pub(super) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub(super) const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
pub(super) const LK_FLOCK: u32 = 1 << 0;
pub(super) const FSYNC_FDATASYNC: u32 = 1 << 0;

macro_rules! operations {
    ($($operation:ident = $number:literal,)*) => {
        /// What the kernel asks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Operation { $($operation,)* }

        impl Operation {
            pub(super) fn from_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$operation),)*
                    _ => None,
                }
            }
        }
    };
}

operations! {
    Lookup = 1, Forget = 2, Getattr = 3, Setattr = 4, Readlink = 5, Symlink = 6, Mknod = 8, Mkdir = 9,
    Unlink = 10, Rmdir = 11, Rename = 12, Link = 13, Open = 14, Read = 15, Write = 16, Statfs = 17,
    Release = 18, Fsync = 20, Setxattr = 21, Getxattr = 22, Listxattr = 23, Removexattr = 24, Flush = 25,
    Init = 26, Opendir = 27, Readdir = 28, Releasedir = 29, Fsyncdir = 30, Getlk = 31, Setlk = 32,
    Setlkw = 33, Create = 35, Interrupt = 36, Destroy = 38, BatchForget = 42, Fallocate = 43,
    Readdirplus = 44, Rename2 = 45, Lseek = 46, CopyFileRange = 47,
}

/// The beginning of every request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) operation: Option<Operation>,
    pub(super) unique: u64,
    pub(super) node: u64,
    pub(super) user: u32,
    pub(super) group: u32,
    pub(super) pid: u32,
}

/// The rest of a request.
pub(super) struct Body<'a>(pub(super) &'a [u8]);

pub(super) fn request(bytes: &[u8]) -> Result<(Header, Body<'_>), Errno> {
    let mut body = Body(bytes);
    let length = body.u32()? as usize;
    let header = Header {
        operation: Operation::from_number(body.u32()?),
        unique: body.u64()?,
        node: body.u64()?,
        user: body.u32()?,
        group: body.u32()?,
        pid: body.u32()?,
    };
    body.u32()?;
    if length != bytes.len() {
        return Err(Errno::INVAL);
    }
    Ok((header, body))
}

impl<'a> Body<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Errno> {
        self.take().map(u32::from_ne_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Errno> {
        self.take().map(u64::from_ne_bytes)
    }

    /// Leaves out so many bytes.
    pub(super) fn skip(&mut self, bytes: usize) -> Result<(), Errno> {
        self.0 = self.0.get(bytes..).ok_or(Errno::INVAL)?;
        Ok(())
    }

    /// Text with a zero behind it.
    pub(super) fn text(&mut self) -> Result<&'a [u8], Errno> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(Errno::INVAL)?;
        let text = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Ok(text)
    }
}

/// A reply's content. Small: what is large is sent beside it.
#[derive(Default)]
pub(super) struct Out(pub(super) Vec<u8>);

impl Out {
    pub(super) fn u16(mut self, number: u16) -> Self {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    pub(super) fn u32(mut self, number: u32) -> Self {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    pub(super) fn u64(mut self, number: u64) -> Self {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    pub(super) fn zeros(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len() + bytes, 0);
        self
    }

    /// `struct fuse_attr`
    pub(super) fn attributes(self, of: &Attributes) -> Self {
        let nanoseconds = |time: Time| time.nanoseconds;
        let seconds = |time: Time| time.seconds.cast_unsigned();
        self.u64(of.inode)
            .u64(of.size)
            .u64(of.blocks)
            .u64(seconds(of.accessed))
            .u64(seconds(of.modified))
            .u64(seconds(of.changed))
            .u32(nanoseconds(of.accessed))
            .u32(nanoseconds(of.modified))
            .u32(nanoseconds(of.changed))
            .u32(of.mode)
            .u32(of.links)
            .u32(of.owner.user)
            .u32(of.owner.group)
            .u32(0)
            .u32(of.block_size)
            .u32(0)
    }

    /// `struct fuse_attr_out`
    pub(super) fn valid_attributes(self, valid: u64, of: &Attributes) -> Self {
        self.u64(valid).u32(0).u32(0).attributes(of)
    }

    /// `struct fuse_entry_out`
    pub(super) fn entry(self, node: u64, valid: u64, of: &Attributes) -> Self {
        self.u64(node).u64(0).u64(valid).u64(valid).u32(0).u32(0).attributes(of)
    }

    /// `struct fuse_open_out`
    pub(super) fn open(self, flags: u32) -> Self {
        self.u64(0).u32(flags).u32(0)
    }

    /// `struct fuse_dirent`
    pub(super) fn dirent(mut self, inode: u64, offset: u64, mode: u32, name: &[u8]) -> Self {
        let length = u32::try_from(name.len()).unwrap_or(0);
        self = self.u64(inode).u64(offset).u32(length).u32((mode >> 12) & 0o17);
        self.0.extend_from_slice(name);
        let padding = self.0.len().next_multiple_of(8) - self.0.len();
        self.zeros(padding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_cut_or_lies_about_its_length_is_refused() {
        let mut bytes = Vec::new();
        for number in [48_u32, 1, 7, 0, 9, 0, 1000, 1001, 42, 0] {
            bytes.extend_from_slice(&number.to_ne_bytes());
        }
        bytes.extend_from_slice(b"a name\0x");
        let (header, mut body) = request(&bytes).unwrap();
        assert_eq!(header.operation, Some(Operation::Lookup));
        assert_eq!((header.unique, header.node, header.pid), (7, 9, 42));
        assert_eq!(body.text(), Ok(&b"a name"[..]));
        assert_eq!(body.text(), Err(Errno::INVAL), "no zero behind it");
        assert!(body.u64().is_err() && body.skip(2).is_err() && body.skip(1).is_ok());
        for length in 0..bytes.len() {
            assert!(request(&bytes[..length]).is_err(), "{length} bytes");
        }
    }
}
