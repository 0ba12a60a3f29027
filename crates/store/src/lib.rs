//! Bytes at rest.
//!
//! ```text
//!  Layout   the data directory: one daemon at a time, every path in it
//!    ├── Ledger   what must be remembered (SQLite): sandboxes, snapshots, pools, images, API keys
//!    ├── Images   root filesystems: one read-only EROFS file each
//!    └── Saves    moments of machines at rest: one directory each
//! ```
//!
//! Invariants:
//! - Only [`Layout`] knows a path under the data directory.
//! - `staging/` → fsync → rename → ledger row = committed. What has no row is garbage, and start-up
//!   removes it; so a crash at any instant leaves a whole image or save, or none.
//! - A write to the ledger is durable when it returns.
//! - What comes from outside (directories, archives, Dockerfiles) is parsed within limits and never
//!   reaches beyond its staging directory.

pub mod dockerfile;
mod files;
pub mod images;
mod layout;
mod ledger;
pub mod saves;

pub use images::{Image, ImageConfig, ImageName, Images, Limits, OnProgress, Progress, Step};
pub use layout::{Layout, Stage};
pub use ledger::{KeyRow, Ledger};
pub use saves::{Imported, LayerChanges, SavedTree, Saves, TreeError};
