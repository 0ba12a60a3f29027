//! The root of the tests' machines.

use std::path::{Path, PathBuf};
use std::process::Command;

use torpor_engines::AGENT;
use torpor_lifecycle::engine::AGENT_PATH;

use super::output;

/// Programs of this host that the test root has.
const PROGRAMS: [&str; 23] = [
    "bash", "cat", "chmod", "dd", "df", "echo", "head", "ip", "kill", "ls", "mkdir", "nproc", "od",
    "perl", "rm", "sh", "sleep", "stat", "sync", "tail", "touch", "true", "wc",
];

/// A small root with the agent and a shell, made once per build of the agent.
pub(crate) fn root() -> PathBuf {
    let mut key = blake3::Hasher::new();
    key.update(AGENT).update(format!("{PROGRAMS:?}").as_bytes());
    let name = format!("conformance-{}.erofs", &key.finalize().to_hex()[..16]);
    let image = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !image.exists() {
        // Several test processes may do it at once: each makes its own, the first one stays, as
        // machines may have begun with it.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let (tree, fresh) = (dir.path().join("tree"), dir.path().join("fresh.erofs"));
        plant(&tree);
        make_image(&tree, &fresh);
        match std::fs::hard_link(fresh, &image) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                panic!("the image is not put in place: {error}")
            }
            Ok(()) | Err(_) => {}
        }
    }
    image
}

/// An image of which every engine can map the programs.
pub(crate) fn make_image(tree: &Path, image: &Path) {
    let mut mkfs = Command::new("mkfs.erofs");
    mkfs.args(["-x-1", "-E", "noinline_data", "--quiet"]).arg(image).arg(tree);
    assert!(mkfs.status().expect("mkfs.erofs runs").success());
}

pub(crate) fn plant(tree: &Path) {
    for dir in ["proc", "sys", "dev", "tmp", "etc", "bin", "root", "usr/bin"] {
        std::fs::create_dir_all(tree.join(dir)).unwrap();
    }
    std::fs::write(tree.join("tmp/.keep"), "").unwrap();
    std::fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/bash\n").unwrap();
    std::fs::write(tree.join("etc/group"), "root:x:0:\n").unwrap();
    write_program(&tree.join(&AGENT_PATH[1..]), AGENT);
    for program in PROGRAMS {
        let host = output(Command::new("which").arg(program));
        let host = Path::new(host.trim());
        write_program(&tree.join("bin").join(program), &std::fs::read(host).unwrap());
        let libraries = output(Command::new("ldd").arg(host));
        for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            write_program(&tree.join(&library[1..]), &std::fs::read(library).unwrap());
        }
    }
}

fn write_program(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path, mode).unwrap();
}
