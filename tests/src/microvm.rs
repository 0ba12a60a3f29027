//! Worlds whose sandboxes are microVMs.
//!
//! `TORPOR_TEST_ENGINE=microvm` makes every world one of them, for whoever wants to see all of the suite on
//! that engine; some tests look at what only gVisor has, and under emulation some take too long.

use std::path::Path;
use std::process::Command;

use crate::template;

/// Of the daemon.
pub(crate) const SETTINGS: [(&str, &str); 2] =
    [("TORPOR_ENGINE_KIND", "microvm"), ("TORPOR_ENGINE_EMULATE", "true")];

pub(crate) fn asked_for() -> bool {
    std::env::var("TORPOR_TEST_ENGINE").is_ok_and(|engine| engine == "microvm")
}

/// Why there can be none here.
pub(crate) fn unfit() -> Option<String> {
    let version = Command::new("qemu-system-x86_64").arg("--version").output();
    let Ok(version) = version else { return Some("QEMU is not installed".into()) };
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let major = version.split_whitespace().nth(3).and_then(|v| v.split('.').next()?.parse().ok());
    if major.is_none_or(|major: u32| major < 10) {
        return Some(format!("QEMU is too old: {version}"));
    }
    let kernels = template::cache().join("kernels");
    let some = std::fs::read_dir(&kernels).is_ok_and(|dir| dir.flatten().next().is_some());
    (!some).then(|| format!("there is no kernel in {}", kernels.display()))
}

pub(crate) fn put_kernels_into(data_dir: &Path) {
    let copied = Command::new("cp")
        .args(["-al", "--"])
        .arg(template::cache().join("kernels"))
        .arg(data_dir)
        .status()
        .expect("cp runs");
    assert!(copied.success(), "the kernels can't be copied");
}
