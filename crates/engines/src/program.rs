//! Where the system's own programs are looked for.

use std::ffi::OsString;

/// The search path of this process and the directories of the system administrator's programs,
/// which are on root's path only on some systems.
pub(crate) fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin:/usr/bin:/bin");
    path
}
