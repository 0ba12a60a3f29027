//! Filesystems in files: images, loop devices, mounts, and the directories they are in.
//!
//! ```text
//!   volume     what outlives machines
//!   scratch    what a machine writes, gone with it
//!     ├── template      empty filesystems, formatted once per size
//!     ├── loop_device   a file seen as a disk
//!     └── mountinfo     what is mounted where
//!   directory  directories of our own
//!   program    where the system's programs are
//! ```

pub mod directory;
mod loop_device;
pub mod mountinfo;
pub mod program;
mod scratch;
mod template;
mod volume;

pub use scratch::{ScratchDisk, format, sweep};
pub use volume::{Usage, VolumeImage, images_in_use};
