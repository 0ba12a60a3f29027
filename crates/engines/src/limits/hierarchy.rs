//! Which control group trees this host has.

use std::io;
use std::path::{Path, PathBuf};

use crate::mountinfo::{self, Mount};

/// Without these a machine is not bounded or cannot go to standby.
const NEEDED: [&str; 4] = ["memory", "cpu", "pids", "freezer"];

/// The trees of this host, discovered once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// cgroup v1: a tree per controller, or for several at once.
    pub(super) v1: Vec<Tree>,
    /// cgroup v2, with the controllers that are not bound to a v1 tree.
    pub(super) v2: Option<Tree>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tree {
    pub(super) mount: PathBuf,
    pub(super) controllers: Vec<String>,
}

impl Tree {
    pub(super) fn controls(&self, controller: &str) -> bool {
        self.controllers.iter().any(|name| name == controller)
    }
}

impl Hierarchy {
    pub fn discover() -> io::Result<Self> {
        let mut found = Self::from_mounts(&mountinfo::read()?);
        if let Some(tree) = &mut found.v2 {
            let controllers = std::fs::read_to_string(tree.mount.join("cgroup.controllers"))?;
            tree.controllers = controllers.split_whitespace().map(str::to_owned).collect();
        }
        Ok(found)
    }

    /// The controllers of the v2 tree stand in a file, not in mountinfo: they are left empty.
    fn from_mounts(mounts: &[Mount]) -> Self {
        let mut found = Self { v1: Vec::new(), v2: None };
        for mount in mounts {
            match mount.filesystem.as_str() {
                "cgroup" => {
                    let controllers: Vec<String> = controllers_of(mount);
                    // The same tree may be mounted at several places: the first is as good as any.
                    let known = found.v1.iter().any(|tree| tree.controllers == controllers);
                    if !controllers.is_empty() && !known {
                        found.v1.push(Tree { mount: mount.point.clone(), controllers });
                    }
                }
                "cgroup2" if found.v2.is_none() => {
                    found.v2 = Some(Tree { mount: mount.point.clone(), controllers: Vec::new() });
                }
                _ => {}
            }
        }
        found
    }

    /// What is there, in one line for people.
    pub fn describe(&self) -> String {
        let v1: Vec<String> = self.v1.iter().map(|tree| tree.controllers.join("+")).collect();
        match (&self.v2, v1.is_empty()) {
            (None, true) => "no control groups are mounted".to_owned(),
            (None, false) => format!("cgroup v1 ({})", v1.join(", ")),
            (Some(v2), true) => {
                format!("cgroup v2 at {} ({})", v2.mount.display(), v2.controllers.join(", "))
            }
            (Some(v2), false) => {
                format!("cgroup v1 ({}) with cgroup v2 at {}", v1.join(", "), v2.mount.display())
            }
        }
    }

    /// Controllers that machines need and this host lacks.
    pub fn missing(&self) -> Vec<&'static str> {
        let there = |name: &&str| match *name {
            // Every v2 group can be frozen, whatever its controllers are.
            "freezer" => self.v2.is_some() || self.v1_tree("freezer").is_some(),
            name => self.tree(name).is_some(),
        };
        NEEDED.into_iter().filter(|name| !there(name)).collect()
    }

    /// Where `controller` is controlled, v1 or v2.
    pub(super) fn tree(&self, controller: &str) -> Option<&Tree> {
        let v2 = self.v2.as_ref().filter(|tree| tree.controls(controller));
        self.v1_tree(controller).or(v2)
    }

    pub(super) fn v1_tree(&self, controller: &str) -> Option<&Tree> {
        self.v1.iter().find(|tree| tree.controls(controller))
    }

    /// Every mounted tree, ours or not.
    pub(super) fn trees(&self) -> impl Iterator<Item = &Tree> {
        self.v1.iter().chain(&self.v2)
    }

    pub(super) fn mounts(&self) -> impl Iterator<Item = &Path> {
        self.trees().map(|tree| tree.mount.as_path())
    }

    /// The trees in which a machine gets a group: those that bound or measure it, and the v2 tree
    /// for freezing (the v1 freezer only where there is none).
    pub(super) fn used(&self) -> impl Iterator<Item = &Tree> {
        const V1: [&str; 4] = ["memory", "cpu", "cpuacct", "pids"];
        let used = |tree: &&Tree| {
            V1.iter().any(|name| tree.controls(name))
                || (self.v2.is_none() && tree.controls("freezer"))
        };
        self.v1.iter().filter(used).chain(&self.v2)
    }
}

/// Options of a v1 mount are its controllers, between options that every filesystem has.
fn controllers_of(mount: &Mount) -> Vec<String> {
    const NOT_CONTROLLERS: [&str; 6] =
        ["rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode"];
    let is_controller = |option: &&String| {
        !NOT_CONTROLLERS.contains(&option.as_str()) && !option.starts_with("release_agent=")
    };
    mount.options.iter().filter(is_controller).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:32 / /somewhere/memory rw,relatime - cgroup cgroup rw,memory
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,release_agent=/x,name=systemd
";
    const V2: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate";
    const UNIFIED: &str = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

    fn parse(text: &str) -> Hierarchy {
        Hierarchy::from_mounts(&mountinfo::parse(text.as_bytes()))
    }

    fn used(hierarchy: &Hierarchy) -> Vec<&str> {
        hierarchy.used().filter_map(|tree| tree.mount.to_str()).collect()
    }

    #[test]
    fn v1_controllers_are_found_once_each() {
        let hierarchy = parse(V1);
        assert!(hierarchy.v2.is_none());
        assert!(hierarchy.missing().is_empty());
        assert_eq!(
            used(&hierarchy),
            [
                "/sys/fs/cgroup/cpu,cpuacct",
                "/sys/fs/cgroup/memory",
                "/sys/fs/cgroup/freezer",
                "/sys/fs/cgroup/pids"
            ]
        );
        assert_eq!(hierarchy.mounts().count(), 5, "the tree of the init system is known too");
        assert_eq!(
            hierarchy.describe(),
            "cgroup v1 (cpu+cpuacct, memory, freezer, pids, name=systemd)"
        );
    }

    #[test]
    fn v2_lacks_what_its_root_does_not_offer() {
        let mut hierarchy = parse(V2);
        let tree = hierarchy.v2.as_mut().expect("the tree is found");
        tree.controllers = vec!["cpu".to_owned(), "pids".to_owned()];
        assert_eq!(hierarchy.missing(), ["memory"]);
        assert_eq!(used(&hierarchy), ["/sys/fs/cgroup"]);
        assert_eq!(hierarchy.describe(), "cgroup v2 at /sys/fs/cgroup (cpu, pids)");
    }

    #[test]
    fn hybrid_freezes_in_the_v2_tree() {
        let hierarchy = parse(&format!("{V1}{UNIFIED}"));
        assert!(hierarchy.missing().is_empty());
        assert_eq!(
            used(&hierarchy),
            [
                "/sys/fs/cgroup/cpu,cpuacct",
                "/sys/fs/cgroup/memory",
                "/sys/fs/cgroup/pids",
                "/sys/fs/cgroup/unified"
            ]
        );
    }

    #[test]
    fn a_host_without_control_groups_lacks_everything() {
        let hierarchy = parse("22 1 0:5 / /proc rw - proc proc rw");
        assert_eq!(hierarchy.missing(), ["memory", "cpu", "pids", "freezer"]);
        assert_eq!(hierarchy.describe(), "no control groups are mounted");
    }
}
