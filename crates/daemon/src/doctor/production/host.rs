//! What the kernel of a host says of itself, read below a root of the caller's choice.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::super::{failed, fine, warned};
use torpor_engines::probe::Finding;

const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";
/// Lowest values with which users of the host learn little of its kernel and use little of it. Those that a
/// kernel does not have are not missed.
const SETTINGS: [(&str, u32, u32); 4] = [
    ("kernel/kptr_restrict", 1, 2),
    ("kernel/dmesg_restrict", 1, 1),
    ("kernel/unprivileged_bpf_disabled", 1, 2),
    ("kernel/unprivileged_userns_clone", 0, 0),
];

/// A host, or a directory that looks like one.
pub(super) struct Host {
    pub(super) root: PathBuf,
    /// Who owns what is Torpor's.
    pub(super) owner: u32,
}

impl Host {
    pub(super) fn here() -> Self {
        Self { root: "/".into(), owner: rustix::process::geteuid().as_raw() }
    }

    /// Where an absolute path is.
    pub(super) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.at(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The names in a directory, in order.
    fn names(&self, dir: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.at(dir)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// All that is told of the kernel and the processor.
    pub(super) fn findings(&self) -> Vec<Finding> {
        vec![self.mitigations(), self.smt(), self.swap(), self.ksm(), self.settings()]
    }

    fn mitigations(&self) -> Finding {
        let name = "CPU mitigations";
        let told = self.names(VULNERABILITIES).into_iter().filter_map(|flaw| {
            let text = self.read(Path::new(VULNERABILITIES).join(&flaw))?;
            Some((flaw, text))
        });
        let told: Vec<_> = told.collect();
        // "SMT vulnerable", in small letters, is the next check's.
        let with = |word: &str| {
            let those = told.iter().filter(|(_, text)| text.contains(word));
            those.map(|(flaw, text)| format!("{flaw}: {text}")).collect::<Vec<_>>().join("; ")
        };
        let (open, unknown) = (with("Vulnerable"), with("Unknown"));
        let remedy = "update the microcode and the kernel, and remove mitigations=off from the \
                      kernel's command line; in a virtual machine the host's operator must do it";
        if !open.is_empty() {
            let detail = format!("sandboxes may read memory of others through {open}");
            return failed(name, detail, remedy);
        }
        if told.is_empty() || !unknown.is_empty() {
            let what = if told.is_empty() { "anything" } else { &*unknown };
            return warned(name, format!("the kernel does not know of {what}"), remedy);
        }
        fine(name, format!("none of {} known flaws is open", told.len()))
    }

    fn smt(&self) -> Finding {
        match self.read("/sys/devices/system/cpu/smt/active").as_deref() {
            Some("1") => warned(
                "SMT",
                "on: a sandbox can observe the one on the same core",
                "echo off > /sys/devices/system/cpu/smt/control, and boot with nosmt",
            ),
            Some(_) | None => fine("SMT", "off"),
        }
    }

    fn swap(&self) -> Finding {
        let name = "swap encryption";
        let table = self.read("/proc/swaps").unwrap_or_default();
        let areas: Vec<_> =
            table.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
        let open: Vec<_> = areas.iter().copied().filter(|area| !self.hides(area)).collect();
        match (&areas[..], &open[..]) {
            ([], _) => fine(name, "there is no swap"),
            (_, []) => fine(name, format!("{}: nothing readable gets to disk", areas.join(", "))),
            (_, open) => failed(
                name,
                format!(
                    "memory of sandboxes and secrets get to disk as they are: {}",
                    open.join(", ")
                ),
                "use zram, or swap on dm-crypt with a random key (option swap in /etc/crypttab)",
            ),
        }
    }

    /// Whether nobody who has the disk can read what is swapped out here.
    fn hides(&self, area: &str) -> bool {
        let device = match area.starts_with("/dev/") {
            true => self.device(Path::new(area)),
            false => self.device_below(Path::new(area)),
        };
        device.is_some_and(|device| self.encrypted(&device))
    }

    /// The kernel's name of a device: `dm-0` of `/dev/mapper/swap`.
    fn device(&self, path: &Path) -> Option<String> {
        let target = fs::read_link(self.at(path)).unwrap_or_else(|_| path.to_owned());
        target.file_name().and_then(OsStr::to_str).map(str::to_owned)
    }

    /// The device with the filesystem that a file is on.
    fn device_below(&self, file: &Path) -> Option<String> {
        let mounts = self.read("/proc/self/mountinfo")?;
        let mounts = mounts.lines().filter_map(|line| {
            let mut words = line.split(' ').skip(2);
            Some((words.next()?, Path::new(words.nth(1)?)))
        });
        let (number, _) = mounts
            .filter(|(_, at)| file.starts_with(at))
            .max_by_key(|(_, at)| at.components().count())?;
        self.device(&Path::new("/sys/dev/block").join(number))
    }

    /// By itself or by all that it is made of.
    fn encrypted(&self, device: &str) -> bool {
        let of = Path::new("/sys/block").join(device);
        if device.starts_with("zram") {
            // Memory, unless it is told to write what is cold to a disk.
            return match self.read(of.join("backing_dev")).as_deref() {
                None | Some("none") => true,
                Some(disk) => self.hides(disk),
            };
        }
        let below = self.names(of.join("slaves"));
        self.read(of.join("dm/uuid")).is_some_and(|uuid| uuid.starts_with("CRYPT-"))
            || (!below.is_empty() && below.iter().all(|device| self.encrypted(device)))
    }

    fn ksm(&self) -> Finding {
        match self.read("/sys/kernel/mm/ksm/run").as_deref() {
            Some("1") => failed(
                "KSM",
                "on: equal pages of sandboxes are merged, and a slow write tells one what another has",
                "echo 2 > /sys/kernel/mm/ksm/run, and disable ksm.service and ksmtuned",
            ),
            Some(_) | None => fine("KSM", "off"),
        }
    }

    fn settings(&self) -> Finding {
        let loose = SETTINGS.into_iter().filter_map(|(path, least, most)| {
            let value: u32 = self.read(Path::new("/proc/sys").join(path))?.parse().ok()?;
            let name = path.replace('/', ".");
            (!(least..=most).contains(&value)).then(|| (format!("{name}={value}"), (name, least)))
        });
        let (loose, wanted): (Vec<_>, Vec<_>) = loose.unzip();
        if loose.is_empty() {
            return fine("kernel settings", "the kernel tells users of this host little of itself");
        }
        let wanted = wanted.iter().map(|(name, value)| format!("{name}={value}"));
        warned(
            "kernel settings",
            format!(
                "who gets out of a sandbox finds the kernel easier to attack: {}",
                loose.join(" ")
            ),
            &format!("sysctl -w {}, and in /etc/sysctl.d", wanted.collect::<Vec<_>>().join(" ")),
        )
    }

    /// Processes that hold what is in sandboxes: the daemon, and keepers with all that they started.
    fn holders(&self, daemon: Option<u32>, runtime_dir: &Path) -> Vec<u32> {
        let pids = self.names("/proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
        let parents: Vec<(u32, u32)> =
            pids.filter_map(|pid| Some((pid, self.parent(pid)?))).collect();
        let keeps = |pid: u32| {
            let line = self.read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split('\0').skip(1);
            words.next() == Some("keeper")
                && words.next().is_some_and(|socket| Path::new(socket).starts_with(runtime_dir))
        };
        let first = parents.iter().map(|(pid, _)| *pid).filter(|pid| keeps(*pid));
        let mut holders: Vec<u32> = daemon.into_iter().chain(first).collect();
        let mut looked_at = 0;
        while let Some(parent) = holders.get(looked_at).copied() {
            looked_at += 1;
            let children =
                parents.iter().filter(|(pid, of)| *of == parent && !holders.contains(pid));
            holders.extend(children.map(|(pid, _)| *pid).collect::<Vec<_>>());
        }
        holders
    }

    /// The fourth field, counted after the name, which may contain anything.
    fn parent(&self, pid: u32) -> Option<u32> {
        let stat = self.read(format!("/proc/{pid}/stat"))?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    }

    /// The daemon forbids core files of itself and of all that it starts; older ones did not.
    pub(super) fn cores(&self, daemon: Option<u32>, runtime_dir: &Path) -> Finding {
        let name = "core files";
        let pattern = self.read("/proc/sys/kernel/core_pattern").unwrap_or_default();
        let leaves = |pid: &u32| {
            let limits = self.read(format!("/proc/{pid}/limits")).unwrap_or_default();
            let line = limits.lines().find_map(|line| line.strip_prefix("Max core file size"));
            match line.and_then(|line| line.split_whitespace().next()) {
                // It is gone by now, or can have none.
                None | Some("1") => false,
                Some("0") => pattern.starts_with('|'),
                Some(_) => true,
            }
        };
        let holders = self.holders(daemon, runtime_dir);
        let leaving: Vec<_> =
            holders.iter().filter(|pid| leaves(pid)).map(u32::to_string).collect();
        if !leaving.is_empty() {
            let detail = format!(
                "secrets and memory of sandboxes get into core files ({pattern}) of processes {}",
                leaving.join(", ")
            );
            let remedy =
                "restart the daemon (systemctl restart torpor): it starts all without them";
            return failed(name, detail, remedy);
        }
        if pattern.starts_with('@') {
            let detail = format!("the kernel sends them to {pattern}, whatever limits say");
            let remedy = "sysctl -w kernel.core_pattern=core, and in /etc/sysctl.d";
            return warned(name, detail, remedy);
        }
        let whose = match holders.len() {
            0 => "the daemon starts without them".to_owned(),
            count => format!("none of {count} processes leaves one"),
        };
        fine(name, whose)
    }
}
