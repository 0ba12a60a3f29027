//! Files, one by one and listed.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use torpor_protocol::guest::{Failure, FailureCode, FileKind, FileStat, Kind, Reply, Request};

use crate::client::{Daemon, Piece};

struct Place {
    daemon: Daemon,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { daemon: Daemon::new(), directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&mut self, request: &Request, bytes: &[u8]) -> Result<FileStat, Failure> {
        let stream = self.daemon.open(request);
        self.daemon.send_all(stream, bytes);
        self.daemon.answer(stream).map(stat)
    }

    fn read(&mut self, name: &str, offset: u64, length: Option<u64>) -> Vec<u8> {
        let path = self.path(name);
        let stream = self.daemon.open(&Request::ReadFile { path, offset, length });
        let (bytes, _, replies) = self.daemon.collect(stream);
        assert!(matches!(replies.as_slice(), [Reply::Stat(_)]), "{replies:?}");
        bytes
    }

    fn list(&mut self, name: &str, depth: u32) -> Vec<FileStat> {
        let path = self.path(name);
        let stream = self.daemon.open(&Request::List { path, depth });
        let (_, _, mut replies) = self.daemon.collect(stream);
        assert_eq!(replies.pop(), Some(Reply::Done));
        let entries = |reply| match reply {
            Reply::Entries { entries } => entries,
            other => panic!("{other:?}"),
        };
        replies.into_iter().flat_map(entries).collect()
    }
}

fn stat(reply: Reply) -> FileStat {
    match reply {
        Reply::Stat(stat) => stat,
        other => panic!("no stat but {other:?}"),
    }
}

fn write_to(path: String) -> Request {
    Request::WriteFile { path, mode: None, append: false, owner: None }
}

#[test]
fn a_written_file_reads_back_in_whole_and_in_part() {
    let mut place = Place::new();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 7).to_le_bytes()[0]).collect();
    let path = place.path("deep/er/file");
    let written = place.write(&write_to(path.clone()), &bytes).unwrap();
    assert_eq!((written.path, written.kind, written.mode), (path, FileKind::File, 0o644));
    assert_eq!(written.size, 3_000_000);
    assert!(place.read("deep/er/file", 0, None) == bytes);
    assert_eq!(place.read("deep/er/file", 2_999_990, None), bytes[2_999_990..]);
    assert_eq!(place.read("deep/er/file", 100, Some(5)), bytes[100..105]);
    assert_eq!(place.read("deep/er/file", 4_000_000, Some(5)), b"");
    assert_eq!(fs::read_dir(place.path("deep/er")).unwrap().count(), 1, "no draft is left");
}

#[test]
fn the_old_file_stays_until_the_new_one_is_complete() {
    let mut place = Place::new();
    fs::write(place.path("file"), "old").unwrap();
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o750)).unwrap();
    let stream = place.daemon.open(&write_to(place.path("file")));
    place.daemon.send(stream, Kind::Data, b"new");
    place.daemon.ask(&Request::Health).unwrap();
    assert_eq!(fs::read(place.path("file")).unwrap(), b"old");
    place.daemon.send(stream, Kind::Reset, &[]);
    place.daemon.ask(&Request::Health).unwrap();
    assert_eq!(fs::read(place.path("file")).unwrap(), b"old");
    assert_eq!(fs::read_dir(place.directory.path()).unwrap().count(), 1, "no draft is left");
    let written = place.write(&write_to(place.path("file")), b"new").unwrap();
    assert_eq!(written.mode, 0o750, "the mode of the old file stays");
    assert_eq!(fs::read(place.path("file")).unwrap(), b"new");
}

#[test]
fn an_appended_file_grows() {
    let mut place = Place::new();
    let path = place.path("log");
    let append = Request::WriteFile { path, mode: Some(0o600), append: true, owner: None };
    place.write(&append, b"one ").unwrap();
    let written = place.write(&append, b"two").unwrap();
    assert_eq!((written.size, written.mode), (7, 0o600));
    assert_eq!(fs::read(place.path("log")).unwrap(), b"one two");
}

#[test]
fn writing_to_a_link_writes_to_what_it_points_to() {
    let mut place = Place::new();
    symlink("target", place.path("link")).unwrap();
    place.write(&write_to(place.path("link")), b"through").unwrap();
    assert_eq!(fs::read(place.path("target")).unwrap(), b"through");
    assert!(fs::symlink_metadata(place.path("link")).unwrap().is_symlink());
    symlink("circle", place.path("circle")).unwrap();
    let failed = place.write(&write_to(place.path("circle")), b"").unwrap_err();
    assert_eq!(failed.code, FailureCode::Io);
}

#[test]
fn what_is_made_belongs_to_its_owner() {
    if !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("only root can give files away");
        return;
    }
    let mut place = Place::new();
    let path = place.path("a/file");
    let owner = Some("daemon".to_owned());
    let request = Request::WriteFile { path, mode: Some(0o4711), append: false, owner };
    let written = place.write(&request, b"x").unwrap();
    assert_eq!((written.uid, written.gid, written.mode), (1, 1, 0o4711));
    assert_eq!(fs::metadata(place.path("a")).unwrap().uid(), 1);
    let again = place.write(&write_to(place.path("a/file")), b"y").unwrap();
    assert_eq!(again.uid, 1, "the owner of the old file stays");
    let owner = Some("no-such-user".to_owned());
    let path = place.path("b");
    let failed = place.daemon.fail(&Request::MakeDir { path, mode: None, owner });
    assert_eq!((failed.code, fs::exists(place.path("b")).unwrap()), (FailureCode::Invalid, false));
}

#[test]
fn only_regular_files_are_read_and_written() {
    let mut place = Place::new();
    let fifo = place.path("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let directory = place.path("");
    for (path, code) in [
        (fifo.as_str(), FailureCode::Invalid),
        ("/dev/zero", FailureCode::Invalid),
        (directory.trim_end_matches('/'), FailureCode::IsADirectory),
    ] {
        let path = path.to_owned();
        let read = Request::ReadFile { path: path.clone(), offset: 0, length: None };
        assert_eq!(place.daemon.fail(&read).code, code, "{path}");
        assert_eq!(place.write(&write_to(path.clone()), b"x").unwrap_err().code, code, "{path}");
        let append = Request::WriteFile { path, mode: None, append: true, owner: None };
        assert_eq!(place.write(&append, b"x").unwrap_err().code, code);
    }
}

#[test]
fn files_without_a_size_are_read_to_their_end() {
    let mut place = Place::new();
    let path = "/proc/self/status".to_owned();
    let stream = place.daemon.open(&Request::ReadFile { path, offset: 0, length: None });
    let (bytes, _, _) = place.daemon.collect(stream);
    assert!(bytes.starts_with(b"Name:"));
}

#[test]
fn a_stat_shows_the_link_itself() {
    let mut place = Place::new();
    symlink("/no/where", place.path("link")).unwrap();
    let path = place.path("link");
    let found = stat(place.daemon.ask(&Request::Stat { path: path.clone() }).unwrap());
    assert_eq!((found.kind, found.target.as_deref()), (FileKind::Symlink, Some("/no/where")));
    assert_eq!(found.path, path);
    let millis = fs::symlink_metadata(place.path("link")).unwrap().mtime() * 1000;
    assert_eq!(found.modified_at_ms / 1000 * 1000, millis);
}

#[test]
fn a_listing_is_sorted_by_path_and_as_deep_as_asked() {
    let mut place = Place::new();
    for name in ["b/two/three/four", "a-file", "a/x", "c"] {
        let path = place.path(name);
        fs::create_dir_all(Path::new(&path).parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    symlink("b", place.path("d")).unwrap();
    let names = |list: Vec<FileStat>| list.into_iter().map(|it| it.path).collect::<Vec<_>>();
    assert_eq!(names(place.list("", 1)), ["a", "a-file", "b", "c", "d"]);
    let two = ["a", "a/x", "a-file", "b", "b/two", "c", "d"];
    assert_eq!(names(place.list("", 2)), two);
    assert_eq!(names(place.list("", u32::MAX)).len(), 9);
    assert_eq!(names(place.list("", 0)), [""; 0]);
    let path = place.path("c");
    let failed = place.daemon.fail(&Request::List { path, depth: 1 });
    assert_eq!(failed.code, FailureCode::NotADirectory);
}

#[test]
fn a_large_listing_comes_in_batches() {
    let mut place = Place::new();
    for number in 0..3000 {
        fs::write(place.path(&format!("{number:04}-{}", "\u{1}".repeat(200))), "").unwrap();
    }
    let listed = place.list("", 1);
    assert_eq!(listed.len(), 3000);
    assert!(listed.is_sorted_by(|a, b| a.path < b.path));
}

#[test]
fn directories_are_made_with_their_parents() {
    let mut place = Place::new();
    let path = place.path("a/b/c");
    let request = Request::MakeDir { path, mode: Some(0o1777), owner: None };
    assert_eq!(stat(place.daemon.ask(&request).unwrap()).mode, 0o1777);
    assert_eq!(fs::metadata(place.path("a/b")).unwrap().mode() & 0o7777, 0o755);
    assert!(place.daemon.ask(&request).is_ok(), "again is fine");
    fs::write(place.path("file"), "").unwrap();
    for (name, code) in [("file", FailureCode::Exists), ("file/x", FailureCode::NotADirectory)] {
        let request = Request::MakeDir { path: place.path(name), mode: None, owner: None };
        assert_eq!(place.daemon.fail(&request).code, code);
    }
    let path = place.path("new/../other/.");
    assert!(place.daemon.ask(&Request::MakeDir { path, mode: None, owner: None }).is_ok());
    assert!(Path::new(&place.path("other")).is_dir());
}

#[test]
fn a_move_replaces_files_and_names_what_is_missing() {
    let mut place = Place::new();
    fs::write(place.path("from"), "new").unwrap();
    fs::write(place.path("to"), "old").unwrap();
    let request = Request::Move { from: place.path("from"), to: place.path("to") };
    assert_eq!(stat(place.daemon.ask(&request).unwrap()).path, place.path("to"));
    assert_eq!(fs::read(place.path("to")).unwrap(), b"new");
    assert_eq!(place.daemon.fail(&request).code, FailureCode::NoSuchFile);
    let request = Request::Move { from: place.path("to"), to: place.path("no/where") };
    let failed = place.daemon.fail(&request);
    assert!(failed.message.contains("no/where"), "{}", failed.message);
}

#[test]
fn a_move_to_another_file_system_keeps_mode_and_time() {
    let mut place = Place::new();
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    if fs::metadata(other.path()).unwrap().dev() == fs::metadata(place.path("")).unwrap().dev() {
        torpor_testkit::not_here("there is one file system only");
        return;
    }
    fs::write(place.path("from"), "content").unwrap();
    fs::set_permissions(place.path("from"), fs::Permissions::from_mode(0o640)).unwrap();
    let before = fs::metadata(place.path("from")).unwrap();
    let to = other.path().join("to").to_str().unwrap().to_owned();
    let moved = stat(place.daemon.ask(&Request::Move { from: place.path("from"), to }).unwrap());
    assert_eq!((moved.mode, moved.size), (0o640, 7));
    assert_eq!(moved.modified_at_ms / 1000, before.mtime());
    assert!(!fs::exists(place.path("from")).unwrap());
}

#[test]
fn removing_a_full_directory_has_to_be_meant() {
    let mut place = Place::new();
    fs::create_dir_all(place.path("tree/deep")).unwrap();
    fs::write(place.path("outside"), "").unwrap();
    symlink(place.path("outside"), place.path("tree/deep/link")).unwrap();
    let path = place.path("tree");
    let request = |recursive| Request::Remove { path: path.clone(), recursive };
    assert_eq!(place.daemon.fail(&request(false)).code, FailureCode::NotEmpty);
    assert_eq!(place.daemon.ask(&request(true)), Ok(Reply::Done));
    assert_eq!(place.daemon.fail(&request(true)).code, FailureCode::NoSuchFile);
    assert!(fs::exists(place.path("outside")).unwrap(), "links are not followed");
}

#[test]
fn a_mode_can_be_changed() {
    let mut place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let request = Request::Chmod { path: place.path("file"), mode: 0o100_751 };
    assert_eq!(stat(place.daemon.ask(&request).unwrap()).mode, 0o751);
}

#[test]
fn strange_paths_get_clear_answers() {
    let mut place = Place::new();
    let long = format!("/tmp/{}", "x".repeat(4096));
    let longer = format!("/{}", "x/".repeat(50_000));
    for (path, code) in [
        ("", FailureCode::Invalid),
        ("relative", FailureCode::Invalid),
        ("/tmp/a\0b", FailureCode::Invalid),
        (long.as_str(), FailureCode::Io),
        (longer.as_str(), FailureCode::Io),
        ("/no/such/file", FailureCode::NoSuchFile),
        ("/etc/passwd/x", FailureCode::NotADirectory),
    ] {
        let failed = place.daemon.fail(&Request::Stat { path: path.to_owned() });
        assert_eq!(failed.code, code, "{}", failed.message);
    }
    for name in ["line\nbreak", "white space", "quote\"'`$(x)", "ünï", "..."] {
        place.write(&write_to(place.path(name)), name.as_bytes()).unwrap();
        assert_eq!(place.read(name, 0, None), name.as_bytes());
    }
    let dotted = place.path("sub/../dotted");
    fs::create_dir(place.path("sub")).unwrap();
    place.write(&write_to(dotted), b"x").unwrap();
    assert_eq!(fs::read(place.path("dotted")).unwrap(), b"x");
    for path in [place.path("sub/"), place.path("sub/."), place.path("sub/.."), "/".to_owned()] {
        assert!(place.write(&write_to(path), b"x").is_err());
    }
}

#[test]
fn names_that_are_no_text_are_shown_as_well_as_can_be() {
    use std::os::unix::ffi::OsStrExt;
    let mut place = Place::new();
    let name = std::ffi::OsStr::from_bytes(b"bad-\xff");
    fs::write(place.directory.path().join(name), "").unwrap();
    assert_eq!(place.list("", 1)[0].path, "bad-\u{fffd}");
}

#[test]
fn a_file_nobody_reads_stops_only_itself() {
    let mut place = Place::new();
    fs::write(place.path("big"), vec![7; 5_000_000]).unwrap();
    let path = place.path("big");
    let stream = place.daemon.open(&Request::ReadFile { path, offset: 0, length: None });
    place.daemon.stingy.push(stream);
    assert!(matches!(place.daemon.next(stream), Piece::Reply(Reply::Stat(_))));
    assert_eq!(place.read("big", 0, None).len(), 5_000_000);
}
