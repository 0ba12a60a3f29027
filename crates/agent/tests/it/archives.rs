//! Trees out and in, and archives that mean no good.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use torpor_protocol::guest::{Failure, FailureCode, Reply, Request};

use crate::client::Daemon;

fn pack(daemon: &mut Daemon, place: &Path) -> Vec<u8> {
    let path = place.to_str().unwrap().to_owned();
    let stream = daemon.open(&Request::Pack { path });
    let (bytes, _, replies) = daemon.collect(stream);
    assert!(matches!(replies.as_slice(), [Reply::Stat(_)]), "{replies:?}");
    bytes
}

fn unpack(daemon: &mut Daemon, place: &Path, tar: &[u8]) -> Result<Reply, Failure> {
    unpack_as(daemon, place, tar, None)
}

fn unpack_as(
    daemon: &mut Daemon,
    place: &Path,
    tar: &[u8],
    owner: Option<&str>,
) -> Result<Reply, Failure> {
    let path = place.to_str().unwrap().to_owned();
    let owner = owner.map(str::to_owned);
    let stream = daemon.open(&Request::Unpack { path, owner, layer: false });
    daemon.send_all(stream, tar);
    daemon.answer(stream)
}

/// A header block as any program could have written it.
pub(crate) fn block(letter: u8, name: &[u8], target: &[u8], size: usize) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name);
    block[100..107].copy_from_slice(b"0000644");
    block[108..115].copy_from_slice(b"0000000");
    block[116..123].copy_from_slice(b"0000000");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[136..147].copy_from_slice(b"00000000000");
    block[148..156].fill(b' ');
    block[156] = letter;
    block[157..157 + target.len()].copy_from_slice(target);
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

pub(crate) fn file(name: &[u8], content: &[u8]) -> Vec<u8> {
    let mut bytes = block(b'0', name, b"", content.len());
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// Everything about a tree, as text.
fn describe(place: &Path) -> String {
    let script = "find . -printf '%P|%y|%m|%U|%G|%l|%Ts|%n|' -type f -exec md5sum {} ';' -o -printf '\n' | sort";
    let output = Command::new("sh").args(["-c", script]).current_dir(place).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn make_tree(place: &Path) {
    let deep = place.join("x".repeat(120)).join("y".repeat(150));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("z".repeat(200)), "deep").unwrap();
    fs::write(place.join("empty"), "").unwrap();
    fs::write(place.join("block"), vec![1; 512]).unwrap();
    fs::write(place.join("big"), vec![2; 1_500_001]).unwrap();
    fs::write(place.join(OsStr::from_bytes(b"bytes-\xff\xfe\n")), "name").unwrap();
    fs::set_permissions(place.join("block"), fs::Permissions::from_mode(0o4751)).unwrap();
    symlink("t".repeat(300), place.join("long-link")).unwrap();
    symlink("/etc/passwd", place.join("absolute-link")).unwrap();
    fs::hard_link(place.join("big"), place.join("hard")).unwrap();
    fs::create_dir(place.join("closed")).unwrap();
    fs::set_permissions(place.join("closed"), fs::Permissions::from_mode(0o500)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(place.join("empty"), Some(3_000_000), Some(7)).unwrap();
    }
    for name in ["big", "closed"] {
        let mut touch = Command::new("touch");
        assert!(touch.args(["-d", "2001-02-03"]).arg(place.join(name)).status().unwrap().success());
    }
}

#[test]
fn a_tree_survives_the_way_out_and_in() {
    let mut daemon = Daemon::new();
    let from = tempfile::tempdir().unwrap();
    let to = tempfile::tempdir().unwrap();
    let tree = from.path().join("tree");
    fs::create_dir(&tree).unwrap();
    make_tree(&tree);
    let tar = pack(&mut daemon, &tree);
    assert_eq!(unpack(&mut daemon, &to.path().join("made"), &tar), Ok(Reply::Done));
    assert_eq!(describe(&to.path().join("made/tree")), describe(&tree));
    // Over what is there already, too.
    assert_eq!(unpack(&mut daemon, &to.path().join("made"), &tar), Ok(Reply::Done));
    assert_eq!(describe(&to.path().join("made/tree")), describe(&tree));
}

#[test]
fn the_tar_program_understands_and_is_understood() {
    let mut daemon = Daemon::new();
    let from = tempfile::tempdir().unwrap();
    let to = tempfile::tempdir().unwrap();
    let tree = from.path().join("tree");
    fs::create_dir(&tree).unwrap();
    make_tree(&tree);
    let mut tar = Command::new("tar")
        .args(["-xp", "-C", to.path().to_str().unwrap()])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    tar.stdin.take().unwrap().write_all(&pack(&mut daemon, &tree)).unwrap();
    assert!(tar.wait().unwrap().success());
    assert_eq!(describe(&to.path().join("tree")), describe(&tree));
    for format in ["gnu", "pax", "ustar", "v7"] {
        let to = tempfile::tempdir().unwrap();
        let mut tar = Command::new("tar");
        tar.args(["-c", "--format", format, "-C", from.path().to_str().unwrap()]);
        if matches!(format, "ustar" | "v7") {
            // These have no room for such names and numbers.
            tar.args(["--exclude=x*", "--exclude=long-link", "--exclude=empty"]);
        }
        let made = tar.arg("tree").output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        assert_eq!(unpack(&mut daemon, to.path(), &made.stdout), Ok(Reply::Done), "{format}");
        if matches!(format, "gnu" | "pax") {
            assert_eq!(describe(&to.path().join("tree")), describe(&tree), "{format}");
        } else {
            assert_eq!(fs::read(to.path().join("tree/block")).unwrap(), [1; 512]);
        }
    }
}

#[test]
fn a_single_file_is_packed_by_its_name() {
    let mut daemon = Daemon::new();
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("file"), "content").unwrap();
    let tar = pack(&mut daemon, &place.path().join("file"));
    unpack(&mut daemon, &place.path().join("copy"), &tar).unwrap();
    assert_eq!(fs::read(place.path().join("copy/file")).unwrap(), b"content");
    let path = place.path().join("none").to_str().unwrap().to_owned();
    assert_eq!(daemon.fail(&Request::Pack { path }).code, FailureCode::NoSuchFile);
}

#[test]
fn an_owner_owns_everything_that_is_unpacked() {
    if !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("only root can give files away");
        return;
    }
    let mut daemon = Daemon::new();
    let place = tempfile::tempdir().unwrap();
    let tar = [file(b"a/b/file", b"x"), block(b'2', b"a/link", b"b", 0)].concat();
    unpack_as(&mut daemon, &place.path().join("new"), &tar, Some("daemon")).unwrap();
    for name in ["new", "new/a", "new/a/b", "new/a/b/file", "new/a/link"] {
        let found = fs::symlink_metadata(place.path().join(name)).unwrap();
        assert_eq!((found.uid(), found.gid()), (1, 1), "{name}");
    }
}

#[test]
fn an_archive_can_not_leave_its_directory() {
    let mut daemon = Daemon::new();
    let place = tempfile::tempdir().unwrap();
    let inside = place.path().join("inside");
    fs::write(place.path().join("victim"), "safe").unwrap();
    let outside = place.path().to_str().unwrap().to_owned();
    let absolute = format!("{outside}/victim");
    let archives = [
        file(b"../victim", b"bad"),
        file(b"a/../../victim", b"bad"),
        file(absolute.as_bytes(), b"bad"),
        [block(b'2', b"link", outside.as_bytes(), 0), file(b"link/victim", b"bad")].concat(),
        [block(b'2', b"up", b"..", 0), file(b"up/victim", b"bad")].concat(),
        [block(b'1', b"hard", b"../victim", 0), file(b"hard", b"bad")].concat(),
        [block(b'1', b"hard", absolute.as_bytes(), 0)].concat(),
        [block(b'2', b"d", b"..", 0), block(b'1', b"hard", b"d/victim", 0)].concat(),
        [block(b'2', b"e", b"..", 0), block(b'5', b"e/made", b"", 0)].concat(),
        [
            block(b'5', b"f", b"", 0),
            file(b"f/x", b""),
            block(b'2', b"f/y", b"..", 0),
            file(b"f/y/../victim", b"bad"),
        ]
        .concat(),
    ];
    for (number, tar) in archives.iter().enumerate() {
        let failed = unpack(&mut daemon, &inside, tar).expect_err(&format!("{number}"));
        assert_eq!(failed.code, FailureCode::Invalid, "{number}: {}", failed.message);
        assert_eq!(fs::read(place.path().join("victim")).unwrap(), b"safe", "{number}");
        assert!(!fs::exists(place.path().join("made")).unwrap());
    }
    // A link at the end of a name is replaced, not followed.
    let tar = [block(b'2', b"l", absolute.as_bytes(), 0), file(b"l", b"mine")].concat();
    unpack(&mut daemon, &inside, &tar).unwrap();
    assert_eq!(fs::read(place.path().join("victim")).unwrap(), b"safe");
    assert_eq!(fs::read(inside.join("l")).unwrap(), b"mine");
}

#[test]
fn devices_are_skipped_and_damage_is_noticed() {
    let mut daemon = Daemon::new();
    let place = tempfile::tempdir().unwrap();
    let tar = [block(b'3', b"null", b"", 0), block(b'6', b"fifo", b"", 0), file(b"ok", b"ok")];
    unpack(&mut daemon, place.path(), &tar.concat()).unwrap();
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
    let mut damaged = file(b"name", b"x");
    damaged[1] ^= 1;
    let whole = file(b"name", &[1; 2000]);
    let sparse = block(b'S', b"sparse", b"", 0);
    let mut endless = block(b'L', b"././@LongLink", b"", 10_000_000);
    endless.resize(2_000_000, b'x');
    for bad in [&damaged[..], b"no archive", &whole[..1000], &sparse, &endless, &[7; 5000]] {
        let failed = unpack(&mut daemon, place.path(), bad).unwrap_err();
        assert_eq!(failed.code, FailureCode::Invalid, "{}", failed.message);
    }
    assert_eq!(unpack(&mut daemon, place.path(), b""), Ok(Reply::Done));
}

/// Two files of mostly holes; one of them has a long name, and an odd one.
fn make_holes(place: &Path) {
    let long = place.join("l".repeat(150));
    fs::create_dir(&long).unwrap();
    for path in [place.join("nothing"), long.join("odd\n\u{e9}".to_owned() + &"n".repeat(100))] {
        fs::File::create(path).unwrap().set_len(30 << 30).unwrap();
    }
    let some = fs::File::create(place.join("some")).unwrap();
    some.set_len(30 << 30).unwrap();
    for at in [0, 5 << 30, (30 << 30) - 3] {
        some.write_all_at(b"xyz", at).unwrap();
    }
}

/// Sizes, and the data of `some`.
fn assert_holes(place: &Path) {
    let odd = "l".repeat(150) + "/odd\n\u{e9}" + &"n".repeat(100);
    for name in ["nothing", "some", &odd] {
        let found = fs::metadata(place.join(name)).unwrap();
        assert_eq!(found.size(), 30 << 30, "{name}");
        assert!(found.blocks() < 100, "{name} takes {} blocks", found.blocks());
    }
    let some = fs::File::open(place.join("some")).unwrap();
    for at in [0, 5 << 30, (30 << 30) - 3] {
        let mut piece = [0; 3];
        some.read_exact_at(&mut piece, at).unwrap();
        assert_eq!(&piece, b"xyz", "{at}");
    }
}

#[test]
fn holes_are_neither_packed_nor_filled() {
    let mut daemon = Daemon::new();
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let tree = from.path().join("tree");
    fs::create_dir(&tree).unwrap();
    make_holes(&tree);
    let packed = pack(&mut daemon, &tree);
    assert!(packed.len() < 100_000, "{}", packed.len());
    assert_eq!(unpack(&mut daemon, to.path(), &packed), Ok(Reply::Done));
    assert_holes(&to.path().join("tree"));
    // The tar program understands and is understood.
    let other = tempfile::tempdir().unwrap();
    let mut tar = Command::new("tar");
    tar.args(["-x", "-C", other.path().to_str().unwrap()]);
    let mut tar = tar.stdin(Stdio::piped()).spawn().unwrap();
    tar.stdin.take().unwrap().write_all(&packed).unwrap();
    assert!(tar.wait().unwrap().success());
    assert_holes(&other.path().join("tree"));
    let made = Command::new("tar")
        .args(["-c", "--sparse", "--format=pax", "-C", from.path().to_str().unwrap(), "tree"])
        .output()
        .unwrap();
    assert_eq!(unpack(&mut daemon, &to.path().join("again"), &made.stdout), Ok(Reply::Done));
    assert_holes(&to.path().join("again/tree"));
}

#[test]
fn sparse_files_made_to_do_harm_are_refused() {
    let mut daemon = Daemon::new();
    let place = tempfile::tempdir().unwrap();
    let mut refused = |records: &str, body: &[u8]| {
        let mut tar = block(b'x', b"pax", b"", records.len());
        tar.extend_from_slice(records.as_bytes());
        tar.resize(tar.len().next_multiple_of(512), 0);
        tar.extend_from_slice(&file(b"bad", body));
        unpack(&mut daemon, place.path(), &tar).unwrap_err().message
    };
    let records = "22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n28 GNU.sparse.realsize=8192\n";
    let map = |text: &str, content: usize| {
        let mut body = text.as_bytes().to_vec();
        body.resize(512 + content, 0);
        body
    };
    for body in [map("1\n0\n4096\n", 512), map("1\n0\n9000\n", 9000), map("x", 0), vec![b'1'; 100]]
    {
        let said = refused(records, &body);
        assert!(said.contains("damaged") || said.contains("cut off"), "{said}");
    }
    let other = refused("22 GNU.sparse.major=2\n28 GNU.sparse.realsize=8192\n", &[]);
    assert!(other.contains("--sparse"), "{other}");
}

#[test]
fn extended_headers_without_an_entry_are_counted() {
    let mut daemon = Daemon::new();
    let place = tempfile::tempdir().unwrap();
    for letter in *b"xgLKV" {
        let mut tar = block(letter, b"more", b"", 0).repeat(20);
        tar.extend_from_slice(&file(b"name", b"x"));
        let failed = unpack(&mut daemon, place.path(), &tar).unwrap_err();
        assert!(failed.message.contains("too many extended headers"), "{}", failed.message);
    }
    assert!(!place.path().join("name").exists());
}

#[test]
fn made_up_file_systems_are_not_packed() {
    let mut daemon = Daemon::new();
    let path = "/proc/self/task".to_owned();
    // Asked for by name they are; and files whose size is a lie do not break the archive.
    let stream = daemon.open(&Request::Pack { path });
    let (bytes, _, _) = daemon.collect(stream);
    assert_eq!(bytes.len() % 512, 0);
}
