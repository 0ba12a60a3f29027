//! A data directory that has the default image, made once and copied (by hard links) into each world.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::daemon::{Daemon, torpor_binary};

/// Fills `data_dir` with a copy of the template; `linked`: it is on the same filesystem.
pub(crate) fn copy_into(data_dir: &Path, linked: bool) {
    let template = ready();
    let copied = Command::new("cp")
        .args([if linked { "-al" } else { "-a" }, "--"])
        .arg(template.join("."))
        .arg(data_dir)
        .status()
        .expect("cp runs");
    assert!(copied.success(), "the template can't be copied");
    // The ledger is written in place: every world needs bytes of its own.
    for entry in fs::read_dir(data_dir).expect("the data directory exists").flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let path = entry.path();
            let bytes = fs::read(&path).expect("a small file");
            fs::remove_file(&path).expect("our own copy");
            fs::write(&path, bytes).expect("our own copy");
        }
    }
}

/// The template, made if it is missing. `TORPOR_TEST_CACHE` says where it is kept.
fn ready() -> PathBuf {
    let cache = cache();
    fs::create_dir_all(&cache).expect("the cache can be made");
    let lock = File::create(cache.join("lock")).expect("the cache is writable");
    lock.lock().expect("nobody keeps the lock for ever");
    let (done, template) = (cache.join("done"), cache.join("template"));
    // The agent is part of the image on disk, so another build of Torpor needs another template.
    let build = build_stamp();
    if fs::read_to_string(&done).is_ok_and(|stamp| stamp == build) {
        return template;
    }
    let _ = fs::remove_file(&done);
    fs::create_dir_all(&template).expect("the cache is writable");
    make(&template);
    fs::write(done, build).expect("the cache is writable");
    template
}

pub(crate) fn cache() -> PathBuf {
    std::env::var_os("TORPOR_TEST_CACHE").map_or_else(
        || torpor_binary().parent().and_then(Path::parent).expect("target").join("test-cache"),
        PathBuf::from,
    )
}

fn build_stamp() -> String {
    let about = fs::metadata(torpor_binary()).expect("torpor is built");
    let modified = about.modified().ok().and_then(|at| at.elapsed().ok().map(|_| at));
    format!("{} {modified:?}", about.len())
}

fn make(template: &Path) {
    let daemon = Daemon::start(template, &[], &[]);
    // An image of an earlier build gets the agent of this one when it is first booted: here, and not
    // once in every world.
    for args in [&["image", "base"] as &[&str], &["create", "--name", "first"], &["rm", "first"]] {
        let done = Command::new(torpor_binary())
            .args(args)
            .env("TORPOR_SERVER", daemon.url())
            .status()
            .expect("torpor runs");
        assert!(done.success(), "{args:?} failed: the default image can't be built");
    }
    daemon.stop();
}
