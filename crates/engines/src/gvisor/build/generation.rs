//! What differs between generations of runsc, all of it. Nobody else compares versions.
//!
//! | | 2024 | 2026 |
//! |---|---|---|
//! | builds | 20240729 to 20241216 | from 20260622 |
//! | file of the root's upper layer | where the bundle says | where a flag says, too, and only if there is a gofer, which a bind mount brings |
//! | a guest is stopped by | freezing its cgroup, as an idle kernel goes on ticking | its kernel, which is quiet then; freezing it loses notifications of its threads, and it kills the guest |
//! | the network of a restored guest | is made before | is made by the restore itself, from what it was told before (since 20260706) |
//! | a restored guest's bundle | is believed | is compared with the saved one, paths included, unless told not to |
//! | its state directory | has files | has a mount, too (since 20260810) |
//! | pages of a save | are read before a guest goes on | can be read while it does |
//!
//! The format of saves differs, too; it is told by content (see `saved`).

use std::io;
use std::path::Path;

use rustix::mount::{UnmountFlags, unmount};
use serde_json::{Value, json};

/// Builds that behave alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Generation {
    Y2024,
    Y2026,
}

/// What stops a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    /// The freezer of its cgroup; its kernel is told only where it must run.
    Freezer,
    /// Its kernel, and nothing else.
    Kernel,
}

/// The oldest build whose control socket is known to speak as we do.
pub(super) const OLDEST: u32 = 20_240_729;
/// Builds before this one let a guest reach the host through /dev/cuse (CVE-2026-96812).
const CUSE_SAFE_SINCE: u32 = 20_260_901;
/// The first build of 2024 whose way of making the upper layer is another.
const NEEDS_GOFER_SINCE: u32 = 20_241_217;
/// From here on a frozen cgroup loses what its threads wait for.
const LOSES_SINCE: u32 = 20_250_624;
/// The first build whose kernel is quiet while it is paused.
const QUIET_SINCE: u32 = 20_260_622;

/// A directory of the guest through which a gofer is had; there is nothing in it, and the agent puts it
/// away.
const GOFER_MOUNT: &str = "/dev/.gofer";

/// Builds on which the tests of this release were run, and how.
const PROVEN: [(&str, &str); 2] = [
    ("0.0~20240729.0", "all tests run on it"),
    (
        "release-20260817.0",
        "./test conformance ran on a build of its sources, not on the official program",
    ),
];

/// How a build of this version was tried out, if it was.
pub(super) fn proof(version: &str) -> Option<&'static str> {
    // `release-20260817.0-70-gabc` is a build of what came after that release.
    let known = |proven: &str| {
        let rest = version.strip_prefix(proven);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    PROVEN.into_iter().find(|(proven, _)| known(proven)).map(|(_, how)| how)
}

/// Whether a guest can reach the host through `/dev/cuse`, where there is one.
pub(super) fn misuses_cuse(date: u32) -> bool {
    date < CUSE_SAFE_SINCE
}

/// Why a build is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unused {
    TooOld,
    Harmful(&'static str),
}

impl Generation {
    pub(super) fn of(date: u32) -> Result<Self, Unused> {
        match date {
            ..OLDEST => Err(Unused::TooOld),
            OLDEST..NEEDS_GOFER_SINCE => Ok(Self::Y2024),
            NEEDS_GOFER_SINCE..LOSES_SINCE => {
                Err(Unused::Harmful("can't start sandboxes as Torpor does"))
            }
            LOSES_SINCE..QUIET_SINCE => Err(Unused::Harmful("loses sandboxes that sleep")),
            QUIET_SINCE.. => Ok(Self::Y2026),
        }
    }

    /// Of the build that a record names, which need not be there any more.
    pub(in super::super) fn of_name(name: &str) -> Option<Self> {
        Self::of(super::date(name)?).ok()
    }

    /// What is said to every `create`, and known by every build of it. All files come from the image and
    /// one open file: the sandbox needs no way to others.
    pub(super) fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Y2024 => &["--directfs=false", "--cpu-num-from-quota"],
            Self::Y2026 => {
                &["--directfs=false", "--cpu-num-from-quota", "--restore-spec-validation=ignore"]
            }
        }
    }

    /// All flags of a `create` that depend on the build; the guest writes into `disk`.
    pub(in super::super) fn create_flags(self, disk: &Path) -> Vec<String> {
        let mut flags: Vec<String> = self.flags().iter().map(ToString::to_string).collect();
        if self == Self::Y2026 {
            flags.push(format!("--overlay2=root:dir={}", disk.display()));
        }
        flags
    }

    /// Completes the description of a machine; `empty` is an empty directory.
    pub(in super::super) fn complete(self, config: &mut Value, empty: &Path) {
        if self == Self::Y2026 {
            let mounts = config["mounts"].as_array_mut().expect("a description has mounts");
            mounts.push(json!({
                "destination": GOFER_MOUNT,
                "type": "bind",
                "source": empty,
                "options": ["ro", "nosuid", "nodev", "noexec"],
            }));
        }
    }

    /// What stops its guests.
    pub fn halt(self) -> Halt {
        match self {
            Self::Y2024 => Halt::Freezer,
            Self::Y2026 => Halt::Kernel,
        }
    }

    /// Calls that give a machine its network; the first that is known.
    pub(in super::super) fn network_calls(self) -> &'static [&'static str] {
        match self {
            Self::Y2024 => &["Network.CreateLinksAndRoutes"],
            Self::Y2026 => &["containerManager.SetNetworkArgs", "Network.CreateLinksAndRoutes"],
        }
    }

    /// Whether a guest can go on while its pages are still read.
    pub(in super::super) fn restores_in_background(self) -> bool {
        self == Self::Y2026
    }

    /// Whether an idle machine leaves the processor alone without being stopped.
    pub fn idles_quietly(self) -> bool {
        self == Self::Y2026
    }
}

/// Whether these are the words of a sandbox that does not know a method.
pub(in super::super) fn unknown_method(message: &str) -> bool {
    message.contains("unknown method")
}

/// Whether these are the words of a sandbox about a save of another build.
pub(in super::super) fn of_another_build(message: &str) -> bool {
    let known = ["hash mismatch", "container specs not found", "version does not match"];
    known.iter().any(|words| message.contains(words))
}

/// Removes the directory that was given to runsc as its `--root`, with the mounts it may have there:
/// two that are made at once lie on top of each other.
pub(crate) fn remove_state(dir: &Path) -> io::Result<()> {
    unmount_state(dir);
    std::fs::remove_dir_all(dir)
}

pub(crate) fn unmount_state(dir: &Path) {
    while unmount(dir.join("null-netns"), UnmountFlags::DETACH).is_ok() {}
}
