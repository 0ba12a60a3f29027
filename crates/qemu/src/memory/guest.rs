//! A process that stands in for QEMU in tests: it maps a file privately, writes some pages and then
//! stands still.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use super::{GuestMemory, PAGE};

/// How the file is mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapped {
    Privately,
    Shared,
    Twice,
}

/// Ended when dropped.
pub(crate) struct Guest {
    pub(crate) pid: i32,
    pub(crate) memory: GuestMemory,
}

impl Guest {
    /// Maps `bytes` of a file and fills these pages with these bytes.
    pub(crate) fn new(file: &File, bytes: u64, writes: &[(u64, u8)]) -> Self {
        let child = Child::new(file, bytes, Mapped::Privately, writes);
        let memory = GuestMemory::of(child.pid, file, bytes).unwrap();
        let pid = child.pid;
        std::mem::forget(child);
        Self { pid, memory }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        end(self.pid);
    }
}

/// The process alone.
pub(crate) struct Child {
    pub(crate) pid: i32,
}

impl Child {
    #[expect(unsafe_code, reason = "a process without a program of its own")]
    pub(crate) fn new(file: &File, bytes: u64, how: Mapped, writes: &[(u64, u8)]) -> Self {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (fd, ready) = (file.as_raw_fd(), writer.as_raw_fd());
        let bytes = usize::try_from(bytes).unwrap();
        // SAFETY: the child makes system calls and writes to memory that it mapped itself; it never
        // returns, allocates or takes a lock.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: this is the child, and the pages are within the mapping.
            unsafe { live(fd, ready, bytes, how, writes) }
        }
        assert!(pid > 0);
        let child = Self { pid };
        drop(writer);
        let mut word = Vec::new();
        File::from(reader).take(1).read_to_end(&mut word).unwrap();
        assert_eq!(word, b"+", "the child could not map the file");
        child
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        end(self.pid);
    }
}

#[expect(unsafe_code, reason = "all of it are system calls")]
unsafe fn live(fd: RawFd, ready: RawFd, bytes: usize, how: Mapped, writes: &[(u64, u8)]) -> ! {
    let (rights, page) = (libc::PROT_READ | libc::PROT_WRITE, PAGE as usize);
    let flags = match how {
        Mapped::Privately | Mapped::Twice => libc::MAP_PRIVATE,
        Mapped::Shared => libc::MAP_SHARED,
    };
    // SAFETY: new mappings at places that the kernel chooses; see the caller for the rest.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let at = libc::mmap(ptr::null_mut(), bytes, rights, flags, fd, 0).cast::<u8>();
        if at.cast() == libc::MAP_FAILED {
            libc::_exit(1);
        }
        if how == Mapped::Twice {
            libc::mmap(ptr::null_mut(), page, rights, flags, fd, 0);
        }
        // Pages that are read are in memory, and still the file's.
        let _ = at.read_volatile();
        for (number, byte) in writes {
            ptr::write_bytes(at.add(usize::try_from(*number).unwrap_or(0) * page), *byte, page);
        }
        libc::write(ready, c"+".as_ptr().cast(), 1);
        loop {
            libc::pause();
        }
    }
}

#[expect(unsafe_code, reason = "there is no handle for a process that was forked")]
fn end(pid: i32) {
    // SAFETY: a child of this process that nobody else waits for.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, ptr::null_mut(), 0);
    }
}
