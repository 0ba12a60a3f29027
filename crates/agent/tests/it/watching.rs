//! Watching files change.

use std::fs;

use torpor_protocol::guest::{ChangeKind, FailureCode, Reply, Request};

use crate::client::Daemon;

fn watch(daemon: &mut Daemon, path: &str, recursive: bool) -> u32 {
    let stream = daemon.open(&Request::Watch { path: path.to_owned(), recursive });
    assert_eq!(daemon.reply(stream), Reply::Done);
    stream
}

/// Waits for one change, past others.
fn expect(daemon: &mut Daemon, stream: u32, path: &str, change: ChangeKind) {
    loop {
        match daemon.reply(stream) {
            Reply::Changed(seen) if seen.path == path && seen.change == change => return,
            Reply::Changed(_) => {}
            other => panic!("{other:?} instead of {path} {change:?}"),
        }
    }
}

#[test]
fn every_kind_of_change_is_told() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().to_str().unwrap();
    let stream = watch(&mut daemon, root, false);
    let (file, other) = (format!("{root}/file"), format!("{root}/other"));
    fs::write(&file, "").unwrap();
    expect(&mut daemon, stream, &file, ChangeKind::Created);
    fs::write(&file, "more").unwrap();
    expect(&mut daemon, stream, &file, ChangeKind::Modified);
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    expect(&mut daemon, stream, &file, ChangeKind::Attributes);
    fs::rename(&file, &other).unwrap();
    expect(&mut daemon, stream, &file, ChangeKind::Renamed);
    expect(&mut daemon, stream, &other, ChangeKind::Created);
    fs::remove_file(&other).unwrap();
    expect(&mut daemon, stream, &other, ChangeKind::Removed);
}

#[test]
fn a_tree_is_watched_as_it_grows_and_moves() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().to_str().unwrap();
    fs::create_dir_all(format!("{root}/old/deep")).unwrap();
    let stream = watch(&mut daemon, root, true);
    fs::write(format!("{root}/old/deep/file"), "").unwrap();
    expect(&mut daemon, stream, &format!("{root}/old/deep/file"), ChangeKind::Created);
    // Made faster than anybody can watch.
    fs::create_dir_all(format!("{root}/new/a/b")).unwrap();
    fs::write(format!("{root}/new/a/b/file"), "").unwrap();
    expect(&mut daemon, stream, &format!("{root}/new/a/b/file"), ChangeKind::Created);
    fs::rename(format!("{root}/new/a"), format!("{root}/old/a")).unwrap();
    expect(&mut daemon, stream, &format!("{root}/old/a"), ChangeKind::Created);
    fs::write(format!("{root}/old/a/b/file"), "x").unwrap();
    expect(&mut daemon, stream, &format!("{root}/old/a/b/file"), ChangeKind::Modified);
}

#[test]
fn a_single_file_can_be_watched_until_it_goes() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file").to_str().unwrap().to_owned();
    let missing = Request::Watch { path: file.clone(), recursive: false };
    assert_eq!(daemon.fail(&missing).code, FailureCode::NoSuchFile);
    fs::write(&file, "").unwrap();
    let stream = watch(&mut daemon, &file, false);
    fs::write(&file, "x").unwrap();
    expect(&mut daemon, stream, &file, ChangeKind::Modified);
    fs::remove_file(&file).unwrap();
    expect(&mut daemon, stream, &file, ChangeKind::Removed);
}
