//! No core files of what holds secrets and tenants' memory.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// A limit that no core file fits in. One and not zero: a limit of zero does not keep the kernel from
/// piping a core to a program (systemd-coredump, apport), and this one does (core(5), fs/coredump.c).
const LIMIT: u64 = 1;

/// Of this process, and by inheritance of the keeper and of every machine that is started from now on.
pub fn forbid() {
    let limit = Rlimit { current: Some(LIMIT), maximum: Some(LIMIT) };
    if let Err(error) = setrlimit(Resource::Core, limit) {
        tracing::warn!(%error, "core files of this daemon and its machines are not forbidden");
    }
    // Not inherited, but it holds however cores are written.
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "this daemon can be dumped");
    }
}
