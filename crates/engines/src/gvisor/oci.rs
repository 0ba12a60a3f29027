//! The description of a machine that runsc reads: `config.json`.
//!
//! What is deliberately absent: files of the host but for volumes, a network namespace (runsc makes an empty one; the
//! card comes over the control socket), raw sockets and device nodes.

use std::path::Path;

use serde_json::{Value, json};
use torpor_lifecycle::engine::AGENT_PATH;

use super::build::Generation;
use super::mounts::Mounts;

/// What the agent may do. It hands down all but `CAP_SYS_ADMIN`.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
];

/// Open files of one process.
const NOFILE: u64 = 65_536;

/// Everything `config.json` depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Description<'a> {
    /// The image.
    pub(super) root: &'a Path,
    pub(super) memory_mib: u64,
    pub(super) empty_root: &'a Path,
    /// Of the build that will read it.
    pub(super) generation: Generation,
    /// What the guest writes lands in a file in this directory.
    pub(super) disk: &'a Path,
    /// The group's path below every cgroup mount; runsc reads the limits there and joins.
    pub(super) cgroups_path: &'a str,
    /// Where it has volumes, if it can have any.
    pub(super) mounts: Option<&'a Mounts>,
}

impl Description<'_> {
    pub(super) fn to_json(self) -> Value {
        // A quarter, as tmpfs files are memory too and the sandbox dies when all of it is used.
        let shm_mib = (self.memory_mib / 4).max(1);
        let mount = |at: &str, kind: &str, options: &[&str]| json!({ "destination": at, "type": kind, "source": kind, "options": options });
        let shm = format!("size={shm_mib}m");
        let mut config = json!({
            "ociVersion": "1.0.2",
            // Until the agent is told who it is.
            "hostname": "sandbox",
            "root": { "path": self.empty_root, "readonly": false },
            "process": {
                "args": [AGENT_PATH],
                "cwd": "/",
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "terminal": false,
                "user": { "uid": 0, "gid": 0 },
                // For kernels that honour set-user-ID bits; gVisor's does not.
                "noNewPrivileges": false,
                "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": NOFILE, "hard": NOFILE }],
                "capabilities": {
                    "bounding": CAPABILITIES,
                    "effective": CAPABILITIES,
                    "permitted": CAPABILITIES,
                },
            },
            "mounts": [
                mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
                mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
                mount("/dev", "tmpfs", &["nosuid", "mode=755"]),
                mount("/dev/pts", "devpts", &["nosuid", "noexec", "mode=0620", "ptmxmode=0666"]),
                mount("/dev/shm", "tmpfs", &["nosuid", "nodev", "mode=1777", &shm]),
            ],
            "linux": {
                "cgroupsPath": self.cgroups_path,
                "namespaces": [
                    { "type": "pid" },
                    { "type": "ipc" },
                    { "type": "uts" },
                    { "type": "mount" },
                ],
            },
            "annotations": {
                "dev.gvisor.spec.rootfs.source": self.root,
                "dev.gvisor.spec.rootfs.type": "erofs",
                // Never "memory": a guest that fills it would take its own kernel down.
                "dev.gvisor.spec.rootfs.overlay": format!("dir={}", self.disk.display()),
            },
        });
        match self.mounts {
            Some(mounts) => {
                let list = config["mounts"].as_array_mut().expect("a description has mounts");
                list.push(mounts.describe());
            }
            None => self.generation.complete(&mut config, self.empty_root),
        }
        config
    }
}
