//! What hostile tars can't do.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

use proptest::prelude::*;
use tar::{Builder, Header};

use super::*;

/// A tar by hand, with names that no honest program writes.
struct Tar(Vec<u8>);

impl Tar {
    fn new() -> Self {
        Self(Vec::new())
    }

    fn entry(mut self, kind: EntryType, name: &str, link: &str, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.name[..name.len()].copy_from_slice(name.as_bytes());
        gnu.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_size(content.len() as u64);
        header.set_mode(0o6755);
        header.set_mtime(1_000_000);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, content: &str) -> Self {
        self.entry(EntryType::Regular, name, "", content.as_bytes())
    }

    fn unpack(mut self, to: &Path) -> io::Result<Unpacked> {
        self.0.extend_from_slice(&[0; 1024]);
        unpack(&self.0[..], &Directory::open(to).unwrap())
    }
}

/// A place with something outside that must stay as it is.
struct World {
    root: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("inside")).unwrap();
        fs::create_dir(root.path().join("outside")).unwrap();
        fs::write(root.path().join("outside/secret"), "untouched").unwrap();
        Self { root }
    }

    fn inside(&self) -> PathBuf {
        self.root.path().join("inside")
    }

    fn assert_outside_untouched(&self) {
        let outside = self.root.path().join("outside");
        assert_eq!(fs::read_to_string(outside.join("secret")).unwrap(), "untouched");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(fs::read_dir(self.root.path()).unwrap().count(), 2);
    }
}

#[test]
fn an_honest_tar_comes_out_as_it_went_in() {
    let world = World::new();
    let tar = Tar::new()
        .entry(EntryType::Directory, "notes", "", b"")
        .entry(EntryType::Directory, "notes/deep", "", b"")
        .file("notes/deep/a", "hello")
        .entry(EntryType::Symlink, "notes/link", "deep/a", b"")
        .entry(EntryType::Link, "notes/hard", "notes/deep/a", b"");
    let unpacked = tar.unpack(&world.inside()).unwrap();
    assert_eq!(unpacked, Unpacked { entries: 5, left_out: 0 });
    for name in ["deep/a", "link", "hard"] {
        assert_eq!(fs::read_to_string(world.inside().join(name)).unwrap(), "hello", "{name}");
    }
    let found = fs::metadata(world.inside().join("deep/a")).unwrap();
    assert_eq!((found.mtime(), found.nlink()), (1_000_000, 2));
    assert_eq!(found.permissions().mode() & 0o7777, 0o755, "set-uid must not survive");
}

#[test]
fn no_name_leads_outside() {
    for name in
        ["a/../../outside/secret", "../outside/secret", "a/..", "/etc/torpor-test", "a//../x"]
    {
        let world = World::new();
        let error = Tar::new().file(name, "owned").unpack(&world.inside()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}: {error}");
        world.assert_outside_untouched();
        assert!(!Path::new("/etc/torpor-test").exists());
    }
}

#[test]
fn nothing_is_written_through_a_link_of_the_tar() {
    let world = World::new();
    let outside = world.root.path().join("outside").display().to_string();
    for (link, write) in [("t/x", "t/x/secret"), ("t/x", "t/x/new"), ("t/d/x", "t/d/x/y/z")] {
        let tar = Tar::new().entry(EntryType::Symlink, link, &outside, b"").file(write, "owned");
        tar.unpack(&world.inside()).unwrap_err();
        world.assert_outside_untouched();
    }
}

#[test]
fn a_file_with_the_name_of_a_link_replaces_the_link() {
    let world = World::new();
    let secret = world.root.path().join("outside/secret").display().to_string();
    let tar = Tar::new().entry(EntryType::Symlink, "t/x", &secret, b"").file("t/x", "mine");
    tar.unpack(&world.inside()).unwrap();
    assert_eq!(fs::read_to_string(world.inside().join("x")).unwrap(), "mine");
    world.assert_outside_untouched();
}

#[test]
fn nothing_is_written_through_a_link_that_was_there() {
    let world = World::new();
    symlink(world.root.path().join("outside"), world.inside().join("x")).unwrap();
    Tar::new().file("t/x/secret", "owned").unpack(&world.inside()).unwrap_err();
    Tar::new().entry(EntryType::Directory, "t/x", "", b"").unpack(&world.inside()).unwrap_err();
    world.assert_outside_untouched();
}

#[test]
fn a_hard_link_reaches_nothing_outside() {
    let world = World::new();
    for target in ["t/../../outside/secret", "/etc/passwd", "t/x/secret"] {
        symlink(world.root.path().join("outside"), world.inside().join("x")).ok();
        let tar = Tar::new().entry(EntryType::Link, "t/l", target, b"");
        tar.unpack(&world.inside()).unwrap_err();
    }
    assert_eq!(fs::metadata(world.root.path().join("outside/secret")).unwrap().nlink(), 1);
}

#[test]
fn devices_and_pipes_are_left_out() {
    let world = World::new();
    let tar = Tar::new()
        .entry(EntryType::Char, "t/null", "", b"")
        .entry(EntryType::Block, "t/disk", "", b"")
        .entry(EntryType::Fifo, "t/pipe", "", b"");
    assert_eq!(tar.unpack(&world.inside()).unwrap(), Unpacked { entries: 0, left_out: 3 });
    assert_eq!(fs::read_dir(world.inside()).unwrap().count(), 0);
}

#[test]
fn a_long_name_is_believed_up_to_a_limit() {
    let world = World::new();
    let name = format!("t/{}", "n".repeat(150));
    let long = [name.as_bytes(), b"\0"].concat();
    let tar = Tar::new().entry(EntryType::GNULongName, "././@LongLink", "", &long).file("t/n", "x");
    tar.unpack(&world.inside()).unwrap();
    assert!(world.inside().join("n".repeat(150)).exists());

    let endless = vec![b'a'; 8192];
    let tar = Tar::new().entry(EntryType::GNULongName, "././@LongLink", "", &endless);
    let error = tar.file("t/n", "x").unpack(&world.inside()).unwrap_err();
    assert!(error.to_string().contains("over 4096 bytes"), "{error}");
}

#[test]
fn pax_names_are_checked_like_others() {
    let world = World::new();
    let record = b"32 path=t/../../outside/secret \n";
    let tar = Tar::new().entry(EntryType::XHeader, "pax", "", record).file("t/a", "owned");
    tar.unpack(&world.inside()).unwrap_err();
    world.assert_outside_untouched();
}

/// A file with holes: records, a map and so much content.
fn sparse(tar: Tar, size: u64, map: &str, content: &[u8]) -> Tar {
    let mut records = String::new();
    for (key, value) in
        [("major", "1"), ("minor", "0"), ("name", "t/holes\n"), ("realsize", &size.to_string())]
    {
        let rest = key.len() + value.len() + 14;
        let length = rest + if rest < 98 { 2 } else { 3 };
        records += &format!("{length} GNU.sparse.{key}={value}\n");
    }
    let mut body = map.as_bytes().to_vec();
    body.resize(512, 0);
    body.extend_from_slice(content);
    let tar = tar.entry(EntryType::XHeader, "pax", "", records.as_bytes());
    tar.entry(EntryType::Regular, "GNUSparseFile.0", "", &body)
}

#[test]
fn holes_stay_holes() {
    let world = World::new();
    let content = [[1; 4096], [2; 4096]].concat();
    let map = format!("3\n0\n4096\n{}\n4096\n{}\n0\n", 5u64 << 30, 30u64 << 30);
    sparse(Tar::new(), 30 << 30, &map, &content)
        .file("t/after", "x")
        .unpack(&world.inside())
        .unwrap();
    let file = fs::File::open(world.inside().join("holes\n")).unwrap();
    let found = file.metadata().unwrap();
    assert_eq!((found.size(), found.mtime()), (30 << 30, 1_000_000));
    assert!(found.blocks() < 100, "{} blocks", found.blocks());
    let mut byte = [0; 2];
    file.read_exact_at(&mut byte, (5 << 30) + 4095).unwrap();
    assert_eq!(byte, [2, 0]);
    assert_eq!(fs::read_to_string(world.inside().join("after")).unwrap(), "x");
}

#[test]
fn zeros_that_were_sent_become_holes() {
    let world = World::new();
    let mut content = vec![0; 8 << 20];
    content[3 << 20] = 1;
    Tar::new().entry(EntryType::Regular, "t/a", "", &content).unpack(&world.inside()).unwrap();
    assert_eq!(fs::read(world.inside().join("a")).unwrap(), content);
    let blocks = fs::metadata(world.inside().join("a")).unwrap().blocks();
    assert!(blocks < 1000, "{blocks} blocks");
}

#[test]
fn maps_made_to_do_harm_are_refused() {
    let cases = [
        (8192, "1\n0\n4096\n", 5000),
        (8192, "1\n0\n4096\n", 100),
        (8192, "1\n4096\n8192\n", 8192),
        (8192, "2\n4096\n10\n0\n10\n", 20),
        (8192, "1\n18446744073709551615\n2\n", 2),
        (8192, "999999\n", 0),
        (8192, "-1\n", 0),
        (u64::MAX, "1\n0\n10\n", 10),
    ];
    for (size, map, content) in cases {
        let world = World::new();
        let tar = sparse(Tar::new(), size, map, &vec![1; content]);
        tar.file("t/after", "x").unpack(&world.inside()).unwrap_err();
        assert_eq!(fs::read_dir(world.inside()).unwrap().count(), 0, "{map:?} left something");
    }
}

#[test]
fn extended_headers_without_an_entry_are_counted() {
    for kind in [EntryType::XHeader, EntryType::XGlobalHeader, EntryType::GNULongName] {
        let world = World::new();
        let tar = (0..20).fold(Tar::new(), |tar, _| tar.entry(kind, "more", "", b""));
        let error = tar.file("t/a", "x").unpack(&world.inside()).unwrap_err();
        assert!(error.to_string().contains("too many extended headers"), "{error}");
    }
}

#[test]
fn a_tar_that_breaks_off_is_an_error() {
    let world = World::new();
    let whole = Tar::new().file("t/a", &"x".repeat(5000)).0;
    let error = unpack(&whole[..3000], &Directory::open(&world.inside()).unwrap()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
    assert_eq!(fs::read_dir(world.inside()).unwrap().count(), 0, "half a file was left");
}

#[test]
fn a_file_in_the_way_of_a_directory_is_an_error() {
    let world = World::new();
    let tar = Tar::new().file("t/a", "file").file("t/a/b", "below");
    tar.unpack(&world.inside()).unwrap_err();
    let tar = Tar::new().entry(EntryType::Directory, "t/d", "", b"").file("t/d", "file");
    tar.unpack(&world.inside()).unwrap_err();
}

#[test]
fn what_we_pack_we_unpack() {
    let world = World::new();
    let mut builder = Builder::new(Vec::new());
    builder.append_dir_all("any", world.root.path().join("outside")).unwrap();
    let tar = builder.into_inner().unwrap();
    unpack(&tar[..], &Directory::open(&world.inside()).unwrap()).unwrap();
    assert_eq!(fs::read_to_string(world.inside().join("secret")).unwrap(), "untouched");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_sequence_of_entries_gets_outside(
        entries in proptest::collection::vec(
            (0u8..5, "(t/)?(\\.\\./){0,2}[xy](/[xy]){0,2}", "(\\.\\./){0,3}(outside|x|y)(/secret)?"),
            1..8,
        )
    ) {
        let world = World::new();
        let mut tar = Tar::new();
        for (kind, name, link) in &entries {
            tar = match kind {
                0 => tar.entry(EntryType::Directory, name, "", b""),
                1 => tar.entry(EntryType::Symlink, name, link, b""),
                2 => tar.entry(EntryType::Link, name, link, b""),
                _ => tar.file(name, "owned"),
            };
        }
        let _ = tar.unpack(&world.inside());
        world.assert_outside_untouched();
    }
}
