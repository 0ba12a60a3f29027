//! Layers: what was written on top of an image, put on top of it again.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use torpor_protocol::guest::{Failure, FailureCode, Reply, Request};

use crate::archives::{block, file};
use crate::client::{Daemon, sh};
use crate::init::machine;

fn lay(daemon: &mut Daemon, place: &Path, entries: &[Vec<u8>]) -> Result<Reply, Failure> {
    let path = place.to_str().unwrap().to_owned();
    let stream = daemon.open(&Request::Unpack { path, owner: None, layer: true });
    daemon.send_all(stream, &entries.concat());
    daemon.answer(stream)
}

fn directory(name: &[u8]) -> Vec<u8> {
    block(b'5', name, b"", 0)
}

/// What an image could hold.
fn image() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let root = place.path();
    for path in ["kept", "gone", "d/old", "d/deep/old", "d/deep/er/old", "whole/a/b", "x/file"] {
        fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs::write(root.join(path), "old").unwrap();
    }
    place
}

/// All paths below, sorted.
fn paths(place: &Path) -> Vec<String> {
    let all = [".", "-mindepth", "1", "-printf", "%P\n"];
    let found = Command::new("find").args(all).current_dir(place).output().unwrap();
    let mut paths: Vec<String> =
        String::from_utf8(found.stdout).unwrap().lines().map(str::to_owned).collect();
    paths.sort();
    paths
}

#[test]
fn whiteouts_take_away_what_was_there_before_and_nothing_else() {
    let mut daemon = Daemon::new();
    let image = image();
    let root = image.path();
    let entries = [
        file(b".wh.gone", b""),
        file(b".wh.whole", b""),
        file(b".wh.never-there", b""),
        file(b"none/.wh.never-there", b""),
        file(b"x/new", b"new"),
        file(b"x/.wh.file", b""),
        // Taken away and brought, in both orders.
        file(b"x/.wh.first", b""),
        file(b"x/first", b"new"),
        file(b"x/.wh.new", b""),
        file(b".wh..wh.plnk", b""),
    ];
    assert_eq!(lay(&mut daemon, root, &entries), Ok(Reply::Done));
    let expected =
        ["d", "d/deep", "d/deep/er", "d/deep/er/old", "d/deep/old", "d/old", "kept", "x"];
    let mut expected: Vec<String> = expected.map(str::to_owned).to_vec();
    expected.extend(["x/first".to_owned(), "x/new".to_owned()]);
    assert_eq!(paths(root), expected);
}

#[test]
fn an_opaque_directory_holds_only_what_the_layer_brought_in_any_order() {
    let mut daemon = Daemon::new();
    let orders: [&[Vec<u8>]; 2] = [
        &[
            directory(b"d/"),
            file(b"d/.wh..wh..opq", b""),
            file(b"d/new", b"new"),
            file(b"d/deep/new", b"new"),
        ],
        &[
            file(b"./d/new", b"new"),
            file(b"d/deep/new", b"new"),
            directory(b"d/"),
            file(b"d//.wh..wh..opq", b""),
        ],
    ];
    for entries in orders {
        let image = image();
        assert_eq!(lay(&mut daemon, image.path(), entries), Ok(Reply::Done));
        let below = paths(&image.path().join("d"));
        assert_eq!(below, ["deep", "deep/new", "new"]);
        assert!(image.path().join("kept").exists());
    }
    // The root too, more than once.
    let image = image();
    let entries = [file(b".wh..wh..opq", b""), file(b"new", b""), file(b".wh..wh..opq", b"")];
    assert_eq!(lay(&mut daemon, image.path(), &entries), Ok(Reply::Done));
    assert_eq!(paths(image.path()), ["new"]);
}

#[test]
fn entries_replace_whatever_is_there_and_follow_nothing() {
    let mut daemon = Daemon::new();
    let image = image();
    let root = image.path();
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir(outside.path().join("directory")).unwrap();
    fs::write(outside.path().join("victim"), "safe").unwrap();
    fs::write(outside.path().join("directory/victim"), "safe").unwrap();
    symlink(outside.path().join("victim"), root.join("link")).unwrap();
    symlink(outside.path().join("directory"), root.join("way")).unwrap();
    symlink(outside.path().join("directory"), root.join("whole/way")).unwrap();
    symlink(outside.path().join("directory"), root.join("d/way")).unwrap();
    fs::hard_link(outside.path().join("victim"), root.join("shared")).unwrap();
    let entries = [
        file(b"link", b"new"),
        file(b"shared", b"new"),
        file(b"whole", b"a file now"),
        directory(b"kept/"),
        file(b"kept/inside", b"new"),
        block(b'2', b"x", b"kept", 0),
        file(b"d/.wh..wh..opq", b""),
        directory(b"way/"),
        file(b"way/.wh.victim", b""),
        block(b'1', b"gone", b"kept/inside", 0),
    ];
    assert_eq!(lay(&mut daemon, root, &entries), Ok(Reply::Done));
    assert_eq!(fs::read_to_string(outside.path().join("victim")).unwrap(), "safe");
    assert_eq!(fs::read_to_string(outside.path().join("directory/victim")).unwrap(), "safe");
    assert_eq!(fs::read_to_string(root.join("whole")).unwrap(), "a file now");
    assert_eq!(fs::read_to_string(root.join("x/inside")).unwrap(), "new");
    assert!(fs::symlink_metadata(root.join("link")).unwrap().is_file());
    assert!(fs::symlink_metadata(root.join("way")).unwrap().is_dir());
    assert_eq!(paths(&root.join("d")), [""; 0]);
    let (one, other) = (fs::metadata(root.join("gone")), fs::metadata(root.join("kept/inside")));
    assert_eq!(one.unwrap().ino(), other.unwrap().ino());
}

#[test]
fn owners_modes_times_and_kinds_are_as_in_the_layer() {
    if !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("only root can give files away");
        return;
    }
    let mut daemon = Daemon::new();
    let from = tempfile::tempdir().unwrap();
    let script = "umask 0; mkdir -p dir/sub; echo x > dir/sub/file; mkfifo -m 666 dir/fifo; \
        mknod -m 666 dir/null c 1 3; chmod 4755 dir/sub/file; chmod 1770 dir; chmod 711 .; \
        chown 7:8 dir/fifo dir/sub . ; ln dir/sub/file dir/hard; ln -s sub dir/link; \
        touch -h -d 2001-02-03 dir/fifo dir/null dir/sub/file dir/link dir/sub dir .";
    let made = Command::new("sh").args(["-c", script]).current_dir(from.path()).status().unwrap();
    assert!(made.success());
    let describe = |place: &Path| {
        let find =
            ["-c", "find . -printf '%P|%y|%m|%U|%G|%l|%Ts|%n\n' | sort; stat -c %t:%T dir/null"];
        let found = Command::new("sh").args(find).current_dir(place).output().unwrap();
        String::from_utf8(found.stdout).unwrap()
    };
    let expected = describe(from.path());
    assert!(expected.contains("dir/fifo|p|666|7|8||"), "{expected}");
    for format in ["pax", "gnu"] {
        let mut tar = Command::new("tar");
        tar.args(["-c", "--format", format, "."]).current_dir(from.path());
        let to = tempfile::tempdir().unwrap();
        let tar = tar.output().unwrap().stdout;
        assert_eq!(lay(&mut daemon, to.path(), std::slice::from_ref(&tar)), Ok(Reply::Done));
        assert_eq!(describe(to.path()), expected);
        // And over what is there already.
        assert_eq!(lay(&mut daemon, to.path(), &[tar]), Ok(Reply::Done));
        assert_eq!(describe(to.path()), expected);
        let fifo = fs::symlink_metadata(to.path().join("dir/fifo")).unwrap();
        assert!(fifo.file_type().is_fifo() && fifo.permissions().mode() & 0o777 == 0o666);
    }
}

#[test]
fn a_directory_that_became_a_file_stays_one() {
    let mut daemon = Daemon::new();
    let image = image();
    let entries = [
        directory(b"y/"),
        directory(b"y/z/"),
        directory(b"y/z/deep/"),
        file(b"y/z", b"a file after all"),
    ];
    assert_eq!(lay(&mut daemon, image.path(), &entries), Ok(Reply::Done));
    assert_eq!(fs::read_to_string(image.path().join("y/z")).unwrap(), "a file after all");
}

#[test]
fn a_hostile_layer_can_not_leave_its_directory() {
    let mut daemon = Daemon::new();
    let place = tempfile::tempdir().unwrap();
    let inside = place.path().join("inside");
    fs::create_dir(&inside).unwrap();
    fs::create_dir(place.path().join("victims")).unwrap();
    fs::write(place.path().join("victims/one"), "safe").unwrap();
    symlink("../victims", inside.join("out")).unwrap();
    let hostile: [&[Vec<u8>]; 9] = [
        &[file(b".wh...", b"")],
        &[file(b"a/.wh...", b"")],
        &[file(b".wh..", b"")],
        &[file(b"../.wh.victims", b"")],
        &[file(b"../victims/.wh..wh..opq", b"")],
        &[file(b"out/.wh.one", b"")],
        &[file(b"out/one", b"bad")],
        &[block(b'2', b"own", b"..", 0), file(b"own/.wh.victims", b"")],
        &[block(b'1', b"hard", b"out/one", 0)],
    ];
    for (number, entries) in hostile.iter().enumerate() {
        let failed = lay(&mut daemon, &inside, entries).expect_err(&format!("{number}"));
        assert_eq!(failed.code, FailureCode::Invalid, "{number}: {}", failed.message);
    }
    // A link is not the directory that it leads to.
    let entries = [file(b"out/.wh..wh..opq", b""), file(b".wh.out", b"")];
    assert_eq!(lay(&mut daemon, &inside, &entries), Ok(Reply::Done));
    assert!(fs::symlink_metadata(inside.join("out")).is_err());
    assert_eq!(fs::read_to_string(place.path().join("victims/one")).unwrap(), "safe");
}

#[test]
fn a_layer_leaves_the_kernels_and_the_agents_places_alone() {
    let Some(mut daemon) = machine() else { return };
    daemon.run(sh("touch /run/old"));
    let entries = [
        directory(b"run/"),
        file(b"run/.wh..wh..opq", b""),
        file(b"run/torpor/sudo", b"no socket"),
        file(b"run/.wh.torpor", b""),
        file(b"run/new", b"new"),
        file(b"proc/sys/kernel/hostname", b"evil"),
        file(b"dev/torpor-test", b"evil"),
        file(b"sys/torpor-test", b"evil"),
        file(b".torpor/agent", b"evil"),
        block(b'1', b"run/agent", b".torpor/agent", 0),
        file(b".wh..torpor", b""),
        file(b".wh.proc", b""),
    ];
    assert_eq!(lay(&mut daemon, Path::new("/"), &entries), Ok(Reply::Done));
    let ran = daemon
        .run(sh("ls /run; test -S /run/torpor/sudo && echo socket; ls /dev /.torpor | \
        grep -c -e torpor-test -e agent"));
    assert_eq!(ran.text(), "new\ntorpor\nsocket\n0\n");
    let failed = lay(&mut daemon, Path::new("/proc"), &[]).unwrap_err();
    assert_eq!(failed.code, FailureCode::Invalid);
}
