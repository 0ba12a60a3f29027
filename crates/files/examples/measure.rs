//! How fast files are through all of it: kernel, agent, channel, service; beside the plain directory, in one run.
//! Needs root, loop devices and /dev/fuse. `cargo run -p torpor-files --example measure --release`

#![expect(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::print_stdout,
    dead_code,
    reason = "what is not expected ends it; it prints; the tests use more of what they share"
)]

#[path = "../tests/it/machine.rs"]
mod machine;
#[path = "../tests/it/world.rs"]
mod world;

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use machine::World;
use tokio::time::Instant;
use world::run;

const MIB: usize = 1 << 20;

fn main() {
    let Some(world) = World::new(2048) else { return };
    let repository = repository(&world);
    for (what, directory) in [("directory", world.host("plain")), ("mount", world.path("guest"))] {
        fs::create_dir(&directory).unwrap();
        println!("{what}:");
        timed("1,000 creates of 2 KB", || {
            for number in 0..1000 {
                fs::write(directory.join(number.to_string()), vec![7; 2048]).unwrap();
            }
        });
        timed("1,000 reads of them", || {
            for number in 0..1000 {
                assert_eq!(fs::read(directory.join(number.to_string())).unwrap().len(), 2048);
            }
        });
        let big = directory.join("big");
        timed("100 MB written", || {
            let mut file = fs::File::create(&big).unwrap();
            for _ in 0..100 {
                file.write_all(&vec![7; MIB]).unwrap();
            }
        });
        drop_caches();
        timed("100 MB read", || {
            let mut file = fs::File::open(&big).unwrap();
            let mut buffer = vec![0; MIB];
            while file.read(&mut buffer).unwrap() > 0 {}
        });
        timed("git clone of 1,000 files", || clone(&repository, &directory.join("clone")));
        timed("rm -rf of it", || fs::remove_dir_all(directory.join("clone")).unwrap());
    }
}

/// Without this the kernel has what was just written.
fn drop_caches() {
    let _ = fs::write("/proc/sys/vm/drop_caches", "1");
}

fn timed(what: &str, act: impl FnOnce()) {
    let began = Instant::now();
    act();
    println!("  {what:<26} {:>8.3} s", began.elapsed().as_secs_f64());
}

fn repository(world: &World) -> std::path::PathBuf {
    let path = world.host("repository");
    run(Command::new("git").args(["init", "-q"]).arg(&path));
    for number in 0..1000 {
        let directory = path.join((number % 20).to_string());
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(number.to_string()), format!("{number}\n").repeat(300)).unwrap();
    }
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.args(["-c", "user.name=a", "-c", "user.email=a@b"]).arg("-C").arg(&path);
        run(command.args(arguments))
    };
    git(&["add", "."]);
    git(&["commit", "-qm", "all"]);
    path
}

fn clone(from: &Path, to: &Path) {
    run(Command::new("git").args(["clone", "-q"]).arg(from).arg(to));
}
