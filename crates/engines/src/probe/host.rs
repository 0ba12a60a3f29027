//! Probes of what the engine takes from the host besides runsc.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::task::spawn_blocking;
use torpor_lifecycle::engine::NoGuestRegistry;
use torpor_protocol::Resources;

use super::sandbox::tempdir;
use super::{Finding, run, unique};
use crate::disk::ScratchDisk;
use crate::gvisor::build::Build;
use crate::limits::{Group, Hierarchy, remove_root};
use crate::network::{Network, NetworkError};

/// Below this an image and a few sandboxes do not fit.
const FREE_DISK_MIN: u64 = 5 << 30;

pub(super) fn root() -> Finding {
    if rustix::process::geteuid().is_root() {
        return Finding::ok("root", "yes");
    }
    Finding::fail("root", "cgroups, mounts and network links need it", "run as root")
}

/// Nothing, where it does no harm.
pub(super) fn cuse(build: Option<&Build>) -> Option<Finding> {
    let there = Path::new("/dev/cuse").exists();
    let harmful = there && build.is_none_or(Build::misuses_cuse);
    harmful.then(|| {
        Finding::fail(
            "/dev/cuse",
            "this runsc lets sandboxes misuse it (CVE-2026-96812)",
            "install release-20260901 or newer, or unload the cuse module",
        )
    })
}

/// Makes an image and reads it back.
pub(super) async fn erofs() -> Finding {
    let done = async {
        let dir = tempdir()?;
        let (tree, image) = (dir.join("tree"), dir.join("image"));
        let made = async {
            std::fs::create_dir(&tree)?;
            std::fs::write(tree.join("file"), [7; 5000])?;
            let (image, tree) = (image.to_string_lossy(), tree.to_string_lossy());
            run("mkfs.erofs", &["-x-1", "-E", "noinline_data", "--quiet", &image, &tree]).await?;
            run("fsck.erofs", &[&image]).await
        };
        let made = made.await;
        std::fs::remove_dir_all(&dir)?;
        made
    };
    let good = |_| "an image was made and checked".to_owned();
    let remedy = "install erofs-utils 1.5 or newer";
    Finding::of("erofs-utils", done.await.map_err(as_error), good, remedy)
}

/// Needed only to make images from a distribution's packages.
pub(super) async fn mmdebstrap() -> Finding {
    match run("mmdebstrap", &["--version"]).await {
        Ok(output) => {
            Finding::ok("mmdebstrap", String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        Err(error) => Finding::warn("mmdebstrap", error.to_string(), "install mmdebstrap"),
    }
}

/// Loads a table and deletes it.
pub(super) async fn nft() -> Finding {
    let table = format!("torpor_probe_{}", unique());
    let done = async {
        run("nft", &["add", "table", "inet", &table]).await?;
        run("nft", &["delete", "table", "inet", &table]).await
    };
    let good = |_| "a table was loaded and deleted".to_owned();
    let remedy = "install nftables, and a kernel with nf_tables";
    Finding::of("nftables", done.await.map_err(as_error), good, remedy)
}

pub(super) fn forwarding() -> Finding {
    let value = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap_or_default();
    match value.trim() {
        "1" => Finding::ok("ip_forward", "on"),
        _ => Finding::ok("ip_forward", "off; switched on when sandboxes need it"),
    }
}

/// Makes a whole network with one slot and removes it.
pub(super) async fn network() -> Finding {
    let tag: String = unique().chars().take(8).collect();
    let done = async {
        let network = Network::open(&tag, &[], Arc::new(NoGuestRegistry)).await?;
        let socket = match network.take().await {
            Ok(slot) => slot
                .packet_socket()
                .map(drop)
                .map_err(|source| NetworkError::Host { action: "open a packet socket", source }),
            Err(error) => Err(error),
        };
        let has_resolver = network.has_resolver();
        network.close().await?;
        socket.map(|()| has_resolver)
    };
    let good = |has_resolver: bool| {
        if has_resolver {
            "links, namespace, firewall and packet socket work".to_owned()
        } else {
            "works, but this host has no name server that sandboxes could ask".to_owned()
        }
    };
    let remedy = "the kernel must have veth, network namespaces and nf_tables";
    Finding::of("network", done.await, good, remedy)
}

/// Makes a group with limits, freezes and thaws it, and removes it.
pub(super) async fn cgroups() -> Finding {
    let done = spawn_blocking(|| {
        let hierarchy = Hierarchy::discover()?;
        let missing = hierarchy.missing();
        if !missing.is_empty() {
            let text = format!("{} missing: {}", missing.join(", "), hierarchy.describe());
            return Err(io::Error::other(text));
        }
        let (tag, id) = (unique(), unique());
        let group = Group::create(&hierarchy, &tag, &id, &Resources::default())?;
        let froze = group.freeze().and_then(|()| group.thaw());
        let removed = group.remove();
        remove_root(&hierarchy, &tag);
        froze.and(removed).map(|()| hierarchy.describe())
    });
    let remedy = "the memory, cpu and pids controllers and a freezer must be mounted and delegated";
    Finding::of("cgroups", done.await.unwrap_or_else(|e| Err(io::Error::other(e))), |d| d, remedy)
}

/// Makes a disk in the data directory's filesystem, writes to it and removes it.
pub(super) async fn loop_mount(data_dir: &Path) -> Finding {
    let base = data_dir.join(format!(".probe-{}", unique()));
    let done = spawn_blocking(move || {
        let (image, mountpoint) = (base.with_extension("img"), base.with_extension("mnt"));
        let disk = ScratchDisk::create(&image, &mountpoint, Resources::DISK_MIN_MIB)?;
        let wrote = std::fs::write(mountpoint.join("file"), [7; 5000]);
        let removed = disk.remove();
        let _ = std::fs::remove_dir(&mountpoint);
        wrote.and(removed)
    });
    let good = |()| "a disk was made, mounted, written and removed".to_owned();
    let remedy = "loop devices and ext4 must be available (modprobe loop), and e2fsprogs installed";
    Finding::of("disks", done.await.unwrap_or_else(|e| Err(io::Error::other(e))), good, remedy)
}

pub(super) fn free_disk(data_dir: &Path) -> Finding {
    let free = match rustix::fs::statvfs(data_dir) {
        Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
        Err(error) => {
            return Finding::fail("free disk", error.to_string(), "check the data directory");
        }
    };
    let detail = format!("{} GiB at {}", free >> 30, data_dir.display());
    if free >= FREE_DISK_MIN {
        return Finding::ok("free disk", detail);
    }
    Finding::warn("free disk", detail, "an image and a few sandboxes need 5 GiB")
}

pub(super) fn swap() -> Finding {
    let info = rustix::system::sysinfo();
    let mib = (info.totalswap * u64::from(info.mem_unit)) >> 20;
    if mib > 0 {
        return Finding::ok("swap", format!("{mib} MiB"));
    }
    let remedy = "add swap (zram or a file on an SSD): sandboxes in standby then cost next to no \
                  memory";
    Finding::warn("swap", "none: sandboxes in standby keep their memory", remedy)
}

/// Says which program is missing rather than "no such file".
fn as_error(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::NotFound {
        return io::Error::new(error.kind(), "it is not installed");
    }
    error
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{Verdict, probe};

    #[tokio::test]
    async fn every_probe_says_what_it_saw_and_what_would_help() {
        let dir = tempfile::tempdir().unwrap();
        let findings = probe(Some(Path::new("/nonexistent/runsc")), &dir.path().join("data")).await;
        let of = |name: &str| findings.iter().find(|f| f.name == name).unwrap();
        assert_eq!(of("runsc").verdict, Verdict::Fail);
        assert_eq!(of("sandbox").verdict, Verdict::Fail);
        for finding in &findings {
            assert!(!finding.detail.is_empty(), "{finding:?}");
            assert_eq!(finding.remedy.is_none(), finding.verdict == Verdict::Ok, "{finding:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }

    #[tokio::test]
    async fn a_host_that_needs_no_runsc_is_not_asked_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let findings = probe(None, dir.path()).await;
        let of = |name: &str| findings.iter().any(|finding| finding.name == name);
        assert!(of("root") && of("nftables"), "{findings:?}");
        assert!(!of("runsc") && !of("sandbox"), "{findings:?}");
    }

    #[tokio::test]
    async fn a_host_with_runsc_starts_a_sandbox() {
        let runsc = Path::new("/usr/bin/runsc");
        if !runsc.exists() || !rustix::process::geteuid().is_root() {
            torpor_testkit::missing("a sandbox needs root and runsc");
            return;
        }
        let finding = super::super::sandbox::starts(runsc).await;
        assert_eq!(finding.verdict, Verdict::Ok, "{finding:?}");
    }
}
