//! Control groups: what bounds a machine, freezes it and says what it uses.
//!
//! ```text
//!   <mount of each controller>/torpor/<tag>/<id>        one group per machine
//!                              │      └ the installation
//!                              └ all installations of this host
//! ```
//!
//! Three layouts of the kernel are served alike: cgroup v1 (a mount per controller), v2 (one mount)
//! and hybrid (v1 controllers and a v2 tree without any, which still freezes and kills better).
//!
//! Invariants: a group that [`Group::create`] returns has all its limits set; a failed `create`
//! leaves no directory; [`Group::remove`] leaves none in any hierarchy, also none that the engine
//! made itself beside ours.

mod bounds;
mod group;
mod hierarchy;
#[cfg(test)]
pub(crate) mod tests;

pub use bounds::Limits;
pub use group::{Group, list, remove_root};
pub use hierarchy::Hierarchy;
use torpor_lifecycle::engine::EngineError;

/// The host's cgroups, if they have all that machines need.
pub(crate) fn complete() -> Result<Hierarchy, EngineError> {
    let hierarchy =
        Hierarchy::discover().map_err(EngineError::failed("find the host's cgroups"))?;
    let missing = hierarchy.missing();
    if !missing.is_empty() {
        let detail = format!("{} are missing ({})", missing.join(", "), hierarchy.describe());
        return Err(EngineError::Capacity { what: "cgroup controllers", detail });
    }
    Ok(hierarchy)
}
