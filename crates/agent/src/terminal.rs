//! Pseudo-terminals.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use torpor_protocol::guest::TerminalSize;

/// What a program in a terminal is told it talks to, unless it is told otherwise.
pub(crate) const TERM: &str = "xterm-256color";
/// The byte that a terminal takes for the end of input.
pub(crate) const END_OF_INPUT: &[u8] = b"\x04";

/// Our end and the process's end of a new terminal.
pub(crate) fn open(size: TerminalSize) -> io::Result<(OwnedFd, OwnedFd)> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    unlockpt(&ours)?;
    let name = ptsname(&ours, Vec::new())?;
    let path = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let theirs = rustix::fs::open(path, flags, Mode::empty())?;
    resize(&ours, size)?;
    Ok((ours, theirs))
}

/// The kernel tells the programs in the terminal.
pub(crate) fn resize(terminal: &OwnedFd, size: TerminalSize) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(terminal, size)?)
}
