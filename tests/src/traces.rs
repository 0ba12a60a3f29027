//! What an installation has on the host: processes, mounts, cgroups, links, namespaces, firewall
//! tables, loop devices. After the last sandbox is removed only the pool may be left, and after a
//! clean stop nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Traces {
    pub processes: BTreeSet<String>,
    pub mounts: BTreeSet<String>,
    pub cgroups: BTreeSet<String>,
    pub links: BTreeSet<String>,
    pub namespaces: BTreeSet<String>,
    pub tables: BTreeSet<String>,
    pub loops: BTreeSet<String>,
}

impl Traces {
    /// Of the installation with this tag, whose files are below `dir`.
    pub fn find(tag: &str, dir: &Path) -> Self {
        let dir = dir.to_string_lossy().into_owned();
        let ours = |text: &str| text.contains(tag) || text.contains(&dir);
        Self {
            processes: processes(&ours),
            mounts: lines_of(&read("/proc/self/mountinfo"), ours),
            cgroups: cgroups(tag),
            links: lines_of(&output("ip", &["-br", "link"]), |line| line.contains(&tag[..6])),
            namespaces: lines_of(&output("ip", &["netns", "list"]), ours),
            tables: lines_of(&output("nft", &["list", "tables"]), ours),
            loops: lines_of(&output("losetup", &["-l", "-n", "-O", "NAME,BACK-FILE"]), ours),
        }
    }

    /// Processes, disks and groups of machines: what must be gone with the last sandbox. The
    /// installation's own namespace and its pool of links stay as long as the daemon runs.
    pub fn of_machines(&self) -> BTreeSet<&String> {
        let machines = self.processes.iter().filter(|line| line.contains("runsc"));
        let disks = self.mounts.iter().filter(|line| !line.contains("/netns/"));
        machines.chain(disks).chain(&self.cgroups).chain(&self.loops).collect()
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
