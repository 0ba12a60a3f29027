//! What every engine knows of its machines: what each is called, whose it is, and how a daemon finds it
//! again that did not start it.
//!
//! ```text
//! <machines>/<id>/       made first and removed last: what is under way has one
//!   machine.json         whose it is (`record`); without it it is nobody's
//!   mark                 how its guest stands; without it it has none
//! ```

mod assignments;
mod footprint;
mod id;
mod paging;
mod place;
mod record;
mod root;
mod turns;
mod users;

use std::path::Path;

pub(crate) use assignments::{Assignments, left_in};
pub(crate) use footprint::{Files, Footprint};
pub(crate) use id::MachineId;
pub(crate) use paging::PagingOut;
pub(crate) use place::Place;
pub(crate) use record::{Mark, MarkFile, Process, Record};
pub(crate) use root::check_root;
pub(crate) use turns::{Turn, Turns};
pub use users::Users;

/// The file of a machine's [`Record`].
pub(crate) const RECORD: &str = "machine.json";
/// The file of a machine's [`Mark`].
pub(crate) const MARK: &str = "mark";

/// Ids in the names of a directory's entries; foreign names are passed over.
pub(crate) fn ids_in(dir: &Path) -> Vec<MachineId> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let id = |name: &str| name.split('.').next().and_then(|stem| stem.parse().ok());
    entries.flatten().filter_map(|entry| id(entry.file_name().to_str()?)).collect()
}

/// What this host has in all.
pub(crate) fn host_memory_mib() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram * u64::from(info.mem_unit)) >> 20
}
