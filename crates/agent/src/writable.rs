//! The agent's own pages, made writable where gVisor is the kernel.
//!
//! Seen with runsc 20240729: after a save, an instruction across the end of a page faulted, gVisor treated that
//! as a write to a page of code and ended the process, and with the agent the sandbox: it takes a fault that comes
//! twice in a row for a write (decision 16). In pages that may be written that is not refused.

use std::io;

use libc::{PROT_EXEC, PROT_READ, PROT_WRITE, PT_LOAD};

/// Of the kernel that the agent is under: the unit of protection.
const PAGE: usize = 4096;

/// Makes all of the program writable that is mapped from its file.
#[expect(unsafe_code, reason = "the program's own headers are read, and its own pages are changed")]
pub fn make_pages_writable() -> io::Result<()> {
    // SAFETY: the kernel says where the headers of this program are, which stay where they are.
    let headers = unsafe {
        let first = libc::getauxval(libc::AT_PHDR) as *const libc::Elf64_Phdr;
        let count = libc::getauxval(libc::AT_PHNUM) as usize;
        if first.is_null() { &[] } else { std::slice::from_raw_parts(first, count) }
    };
    // At a fixed place, so an address in a header is one of the process.
    for header in headers.iter().filter(|header| header.p_type == PT_LOAD) {
        let (begin, size) = (header.p_vaddr as usize, header.p_memsz as usize);
        let first = begin & !(PAGE - 1);
        let length = (begin + size).next_multiple_of(PAGE) - first;
        let executed = if header.p_flags & libc::PF_X == 0 { 0 } else { PROT_EXEC };
        // SAFETY: these pages are the program's own, and nobody relies on a fault when they are written.
        let changed = unsafe {
            libc::mprotect(first as *mut libc::c_void, length, PROT_READ | PROT_WRITE | executed)
        };
        if changed != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
