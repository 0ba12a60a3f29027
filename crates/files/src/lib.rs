//! Files of volumes and drives, for whoever has no mount of them: guests, the API, other nodes.
//!
//! ```text
//!   Volume: a directory tree that the host mounted, and descriptors in it that are used again
//!     ├─ FileService   one attachment: calls of `protocol::guest::files`, by handles
//!     └─ Volume        by paths, for callers outside of a guest (`paths.rs`)
//! ```
//!
//! Invariants:
//! - Nothing outside of the tree is reached, whatever names, links and handles are sent: names are single, links are
//!   never followed, paths are resolved beneath the root by the kernel, handles carry a code that only we can make.
//! - A handle is what the kernel itself calls the file; what is known of an attachment beside it (descriptors, answers
//!   lately given) is a cache, but for locks. So a service that is opened anew with the same key goes on.
//! - Only regular files and directories are ever opened; of all else only attributes are touched.
//! - A guest that knows a directory goes on seeing it wherever it is moved to, as with an open descriptor.
//! - Every call ends when the host's disk does what it is asked: no call waits for another attachment.

mod attributes;
mod cache;
mod content;
mod done;
mod handle;
mod locks;
mod names;
mod paths;
mod service;
mod volume;

pub use paths::{Listed, Page, Upload, WriteOptions};
pub use service::{Access, FileService, KEY_LENGTH};
pub use volume::Volume;
