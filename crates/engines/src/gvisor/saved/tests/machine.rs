//! A real machine, run by `runsc` on this host, and its save.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;

/// Programs of this host that the guest has.
const PROGRAMS: [&str; 20] = [
    "bash",
    "cat",
    "chmod",
    "chown",
    "cp",
    "dd",
    "find",
    "head",
    "ln",
    "mkdir",
    "mkfifo",
    "mknod",
    "mv",
    "rm",
    "sha256sum",
    "sleep",
    "touch",
    "truncate",
    "rmdir",
    "sync",
];

/// A machine that was saved. Its files are removed with it.
pub(super) struct Saved {
    dir: tempfile::TempDir,
    /// What the guest said.
    pub(super) said: Vec<u8>,
}

impl Saved {
    /// Runs `script` in a machine over an image that `plant` adds to, and saves it.
    /// `None` after a word to the reader where this host can't.
    pub(super) fn new(plant: impl FnOnce(&Path), script: &str) -> Option<Self> {
        if let Some(why) = unfit() {
            torpor_testkit::missing(why);
            return None;
        }
        let dir = tempfile::Builder::new().prefix("tps").tempdir().expect("a directory");
        let mut saved = Self { dir, said: Vec::new() };
        for name in ["tree", "empty", "disk", "run"] {
            fs::create_dir(saved.path(name)).unwrap();
        }
        plant_programs(&saved.tree());
        plant(&saved.tree());
        let mut mkfs = Command::new("mkfs.erofs");
        mkfs.args(["-x-1", "-E", "noinline_data", "--quiet"]);
        run(mkfs.arg(saved.path("image")).arg(saved.tree()));
        let config = config(saved.dir.path()).to_string();
        fs::write(saved.path("config.json"), config).unwrap();

        let sandbox = Sandbox { root: saved.path("run") };
        let mut create = sandbox.runsc(&["create", "--bundle"]);
        run(create.arg(saved.dir.path()).arg("box"));
        run(&mut sandbox.runsc(&["start", "box"]));
        saved.go_on(&sandbox, script);
        Some(saved)
    }

    /// Revives the machine, runs `script` in it and saves it again.
    pub(super) fn again(&mut self, script: &str) {
        let earlier = self.path("earlier");
        fs::rename(self.save(), &earlier).unwrap();
        let sandbox = Sandbox { root: self.path("run") };
        let mut restore = sandbox.runsc(&["restore", "--detach", "--image-path"]);
        run(restore.arg(&earlier).arg("--bundle").arg(self.dir.path()).arg("box"));
        self.go_on(&sandbox, script);
    }

    fn go_on(&mut self, sandbox: &Sandbox, script: &str) {
        let mut exec = sandbox.runsc(&["exec", "box", "/bin/bash", "-euc", script]);
        let output = exec.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && errors.is_empty(), "{}: {errors}", output.status);
        self.said = output.stdout;
        fs::create_dir(self.save()).unwrap();
        let mut save = sandbox.runsc(&["checkpoint", "--compression=none", "--leave-running"]);
        run(save.arg("--image-path").arg(self.save()).arg("box"));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The save.
    pub(super) fn save(&self) -> PathBuf {
        self.path("save")
    }

    /// The tree of which the image was made.
    pub(super) fn tree(&self) -> PathBuf {
        self.path("tree")
    }
}

fn unfit() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("machines need root".into());
    }
    let mut programs = ["/usr/bin/runsc", "/usr/bin/mkfs.erofs"].into_iter();
    let missing = programs.find(|program| !Path::new(program).exists());
    missing.map(|program| format!("{program} is not installed"))
}

/// Removes the machine, however the test ends.
struct Sandbox {
    root: PathBuf,
}

impl Sandbox {
    fn runsc(&self, args: &[&str]) -> Command {
        let mut runsc = Command::new("/usr/bin/runsc");
        runsc.arg(format!("--root={}", self.root.display()));
        runsc.args([
            "--network=none",
            "--platform=systrap",
            "--directfs=false",
            "--ignore-cgroups",
        ]);
        runsc.args(args);
        runsc
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.runsc(&["delete", "--force", "box"]).output();
    }
}

/// Runs a program that must succeed. Its output is nobody's: a sandbox keeps it open.
fn run(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(command.status().expect("the program runs").success(), "{command:?}");
}

fn config(dir: &Path) -> serde_json::Value {
    let capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_MKNOD", "CAP_FSETID"];
    let mount = |at: &str, kind: &str| json!({ "destination": at, "type": kind, "source": kind });
    json!({
        "ociVersion": "1.0.2",
        "hostname": "box",
        "root": { "path": dir.join("empty"), "readonly": false },
        "process": {
            "args": ["/bin/sleep", "infinity"],
            "cwd": "/",
            "env": ["PATH=/bin", "LC_ALL=C"],
            "user": { "uid": 0, "gid": 0 },
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
        },
        "mounts": [mount("/proc", "proc"), mount("/dev", "tmpfs"), mount("/dev/shm", "tmpfs")],
        "linux": { "namespaces": [{ "type": "pid" }, { "type": "mount" }] },
        "annotations": {
            "dev.gvisor.spec.rootfs.source": dir.join("image"),
            "dev.gvisor.spec.rootfs.type": "erofs",
            "dev.gvisor.spec.rootfs.overlay": format!("dir={}", dir.join("disk").display()),
        },
    })
}

fn plant_programs(tree: &Path) {
    for dir in ["proc", "sys", "dev", "tmp", "bin"] {
        fs::create_dir(tree.join(dir)).unwrap();
    }
    fs::write(tree.join("tmp/.keep"), "").unwrap();
    let words = |command: &mut Command| {
        let output = command.output().expect("the program runs").stdout;
        let text = String::from_utf8(output).unwrap();
        text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for program in PROGRAMS {
        let host = words(Command::new("which").arg(program)).remove(0);
        let libraries = words(Command::new("ldd").arg(&host));
        put(Path::new(&host), &tree.join("bin").join(program));
        for library in libraries.iter().filter(|word| word.starts_with('/')) {
            put(Path::new(library), &tree.join(&library[1..]));
        }
    }
}

fn put(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    fs::copy(from, to).unwrap();
    fs::set_permissions(to, fs::Permissions::from_mode(0o755)).unwrap();
}
