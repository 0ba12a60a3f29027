//! Reads the files of an ext4 filesystem without mounting it: a host kernel must never see a disk
//! that a guest wrote.
//!
//! ```text
//!   superblock ─▶ group descriptors ─▶ inode tables ─▶ inode ─┬▶ runs of blocks ─▶ names, content
//!                                                             └▶ attributes: what an overlay marked
//! ```
//!
//! Nothing in the disk is trusted: every number is checked, every walk is bounded, nothing is
//! followed twice. A disk that makes no sense is an error and never more than that. Blocks that are
//! claimed by files and directories are counted: together they are no more than the disk has, so
//! whatever the disk says, reading it ends after about as many reads as a whole disk needs.
//!
//! What it is for is [`Upper`]: the upper directory of an overlay filesystem, as a list. Checksums
//! are not looked at: who can write the disk can write them.

mod attributes;
mod directory;
mod error;
mod filesystem;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod inode;
mod number;
mod runs;
mod source;
mod superblock;
mod upper;
mod walk;

pub use error::Ext4Error;
pub use filesystem::Filesystem;
pub use source::ReadAt;
pub use upper::{Entry, Files, Kind, Limits, Upper};
