//! What an installation has on the host: processes, mounts, cgroups, links, namespaces, firewall
//! tables, loop devices. After the last sandbox is removed only what is prepared ahead may be left,
//! and after a clean stop nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Pid;
use serde_json::Value;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Traces {
    pub processes: BTreeSet<String>,
    pub mounts: BTreeSet<String>,
    pub cgroups: BTreeSet<String>,
    pub links: BTreeSet<String>,
    pub namespaces: BTreeSet<String>,
    pub tables: BTreeSet<String>,
    pub loops: BTreeSet<String>,
    /// By their own ids.
    pub machines: BTreeMap<String, Machine>,
}

/// A machine whose record is whole.
#[derive(Debug, PartialEq, Eq)]
pub struct Machine {
    /// Whose it is; none: it was prepared ahead.
    pub sandbox: Option<String>,
    pub pid: i32,
}

impl Traces {
    /// Of the installation with this tag, whose files are below `dir`.
    pub fn find(tag: &str, dir: &Path) -> Self {
        // A filesystem of the test's own, below everything, is no trace.
        let own = format!(" {} ", dir.join("data").display());
        let dir = dir.to_string_lossy().into_owned();
        let ours = |text: &str| text.contains(tag) || text.contains(&dir);
        Self {
            processes: processes(&ours),
            mounts: lines_of(&read("/proc/self/mountinfo"), |line| {
                ours(line) && !line.contains(&own)
            }),
            cgroups: cgroups(tag),
            links: lines_of(&output("ip", &["-br", "link"]), |line| line.contains(&tag[..6])),
            namespaces: lines_of(&output("ip", &["netns", "list"]), ours),
            tables: lines_of(&output("nft", &["list", "tables"]), ours),
            loops: lines_of(&output("losetup", &["-l", "-n", "-O", "NAME,BACK-FILE"]), ours),
            machines: ["machines", "vm/machines"]
                .iter()
                .flat_map(|dir| machines(&Path::new("/run/torpor").join(tag).join(dir)))
                .collect(),
        }
    }

    /// Processes, disks and groups of machines: what must be gone with the last sandbox. The
    /// installation's own namespace, its pool of links and what was prepared ahead stay as long as
    /// the daemon runs.
    pub fn of_machines(&self) -> BTreeSet<&String> {
        self.of_all_but(|machine| machine.sandbox.is_none())
    }

    /// What belongs to none of the machines that `excused` names.
    pub fn of_all_but(&self, excused: impl Fn(&Machine) -> bool) -> BTreeSet<&String> {
        let excused: Vec<_> = self
            .machines
            .iter()
            .filter(|(_, machine)| excused(machine))
            .map(|(id, _)| id)
            .collect();
        let machines = self.processes.iter().filter(|line| line.contains("runsc"));
        let shared = |line: &String| line.contains("/netns/") || line.contains("/runsc/null-netns");
        let disks = self.mounts.iter().filter(|line| !shared(line));
        let all = machines.chain(disks).chain(&self.cgroups).chain(&self.loops);
        all.filter(|line| !excused.iter().any(|id| line.contains(*id))).collect()
    }

    /// The process that is the machine of the sandbox with this id.
    pub fn machine_of(&self, sandbox: &str) -> Option<Pid> {
        let mut machines = self.machines.values();
        let machine = machines.find(|machine| machine.sandbox.as_deref() == Some(sandbox))?;
        Pid::from_raw(machine.pid)
    }

    /// Every process, by its number.
    pub fn pids(&self) -> Vec<Pid> {
        self.pids_of("")
    }

    /// Every process with `text` in its command line.
    pub fn pids_of(&self, text: &str) -> Vec<Pid> {
        let pid = |line: &String| Pid::from_raw(line.split(' ').next()?.parse().ok()?);
        self.processes.iter().filter(|line| line.contains(text)).filter_map(pid).collect()
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

fn lines_of(text: &str, ours: impl Fn(&str) -> bool) -> BTreeSet<String> {
    text.lines().filter(|line| ours(line)).map(str::to_owned).collect()
}

fn processes(ours: &dyn Fn(&str) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        if !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let line = read(&format!("/proc/{pid}/cmdline")).replace('\0', " ");
        if ours(&line) {
            found.insert(format!("{pid} {line}"));
        }
    }
    found
}

/// Groups of machines, in whatever hierarchy.
fn cgroups(tag: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let roots = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|e| e.path());
    for root in roots.chain(["/sys/fs/cgroup".into()]) {
        let groups = root.join("torpor").join(tag);
        for group in fs::read_dir(groups).into_iter().flatten().flatten() {
            if group.path().is_dir() {
                found.insert(group.path().to_string_lossy().into_owned());
            }
        }
    }
    found
}

fn machines(dir: &Path) -> BTreeMap<String, Machine> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let machine = |path: PathBuf| {
        let record: Value =
            serde_json::from_slice(&fs::read(path.join("machine.json")).ok()?).ok()?;
        let pid = i32::try_from(record["process"]["pid"].as_i64()?).ok()?;
        let sandbox = record["sandbox"].as_str().map(str::to_owned);
        Some((path.file_name()?.to_string_lossy().into_owned(), Machine { sandbox, pid }))
    };
    entries.filter_map(|entry| machine(entry.path())).collect()
}
