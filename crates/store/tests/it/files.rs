//! The files of a save as a layer: what goes in comes out, whatever a guest called it.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use torpor_lifecycle::engine::{Change, ChangeKind, Changes, See};
use torpor_lifecycle::store::{LAYER_FILE, Saves as _, StoreError};
use torpor_protocol::ImageId;
use torpor_protocol::snapshot::SnapshotKind;
use torpor_store::LayerChanges;

use crate::saves::{commit, pictured};
use crate::world::{Tar, World};

/// Changes made by hand.
#[derive(Debug, Default, Clone)]
pub(crate) struct Made {
    entries: Vec<Change>,
    /// What files have, and where.
    contents: BTreeMap<Vec<u8>, Vec<(u64, Vec<u8>)>>,
}

impl Made {
    pub(crate) fn file(mut self, path: impl AsRef<[u8]>, content: impl AsRef<[u8]>) -> Self {
        let content = content.as_ref().to_vec();
        let size = content.len() as u64;
        self.contents.insert(path.as_ref().to_vec(), vec![(0, content)]);
        self.add(path, ChangeKind::File { size })
    }

    /// A file of holes, but for these pieces.
    pub(crate) fn sparse(mut self, path: &str, size: u64, pieces: &[(u64, &[u8])]) -> Self {
        let pieces = pieces.iter().map(|(at, piece)| (*at, piece.to_vec())).collect();
        self.contents.insert(path.into(), pieces);
        self.add(path, ChangeKind::File { size })
    }

    pub(crate) fn dir(self, path: impl AsRef<[u8]>, opaque: bool) -> Self {
        let made = self.add(path, ChangeKind::Directory { opaque });
        made.with(|change| change.mode = 0o755)
    }

    pub(crate) fn removed(self, path: impl AsRef<[u8]>) -> Self {
        self.add(path, ChangeKind::Removed)
    }

    pub(crate) fn add(mut self, path: impl AsRef<[u8]>, kind: ChangeKind) -> Self {
        let path = path.as_ref().to_vec();
        let modified_at_ms = 1_700_000_000_000;
        self.entries.push(Change { path, kind, mode: 0o644, uid: 0, gid: 0, modified_at_ms });
        self
    }

    /// Changes what was added last.
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Change)) -> Self {
        change(self.entries.last_mut().unwrap());
        self
    }

    fn pieces(&self, index: usize) -> Vec<(u64, &[u8])> {
        let pieces = self.contents[&self.entries[index].path].iter();
        let pieces = pieces.map(|(at, piece)| (*at, piece.as_slice()));
        pieces.filter(|(_, piece)| !piece.is_empty()).collect()
    }

    fn sorted(mut self) -> Self {
        self.entries.sort_by(|a, b| a.path.cmp(&b.path));
        self
    }

    pub(crate) fn boxed(&self) -> Box<dyn Changes> {
        Box::new(self.clone().sorted())
    }
}

impl Changes for Made {
    fn entries(&self) -> &[Change] {
        &self.entries
    }

    fn data(&self, index: usize) -> io::Result<Vec<Range<u64>>> {
        let pieces = self.pieces(index).into_iter();
        Ok(pieces.map(|(at, piece)| at..at + piece.len() as u64).collect())
    }

    fn read(&self, index: usize, see: See<'_>) -> io::Result<()> {
        self.pieces(index).into_iter().try_for_each(|(at, piece)| see(at, piece))
    }
}

fn read(changes: &dyn Changes, path: &[u8]) -> Vec<u8> {
    let index = changes.entries().iter().position(|change| change.path == path).unwrap();
    let mut out = Vec::new();
    changes.copy(index, &mut out).unwrap();
    out
}

/// The layer that changes become, in a save.
async fn layered(world: &World, image: &ImageId, made: &Made) -> (PathBuf, LayerChanges) {
    let memory = commit(world, image).await;
    let save = world.saves.files_of(&memory, made.boxed()).await.unwrap();
    assert_eq!(save.manifest.about.kind, SnapshotKind::Filesystem);
    assert_eq!(save.manifest.about.processes, []);
    assert_eq!(save.manifest.about.engine_version, memory.manifest.about.engine_version);
    let path = save.dir.join(LAYER_FILE);
    let layer = LayerChanges::open(&save.dir).unwrap();
    // It goes with the world.
    std::mem::forget(save);
    (path, layer)
}

fn one_of_everything() -> Made {
    let link = |to: &str| ChangeKind::HardLink { to: to.into() };
    Made::default()
        .dir("", false)
        .dir("a", true)
        .with(|change| (change.mode, change.uid, change.gid) = (0o1777, 12, 4_000_000_000))
        .file("a/big", vec![5; 300_000])
        .file("a/empty", "")
        .file("a/setuid", "x")
        .with(|change| (change.mode, change.modified_at_ms) = (0o4755, 1_699_999_999_123))
        .add("a/zlink", link("a/big"))
        .add("b", ChangeKind::Symlink { target: b"/nowhere/\xff".into() })
        .add("c", ChangeKind::Fifo)
        .add("d", ChangeKind::CharDevice { major: 1, minor: 3 })
        .add("e", ChangeKind::BlockDevice { major: 259, minor: 1_048_575 })
        .removed("etc/hostname")
        .file("old", "before 1970")
        .with(|change| change.modified_at_ms = -1_500)
}

#[tokio::test]
async fn a_layer_gives_back_what_was_put_in() {
    let (world, image) = pictured().await;
    let made = one_of_everything().sorted();
    let (_, layer) = layered(&world, &image, &made).await;
    let mut expected = made.entries.clone();
    for change in &mut expected {
        // Of what is not there, nothing else is known.
        if change.kind == ChangeKind::Removed {
            (change.mode, change.modified_at_ms) = (0o755, 0);
        }
    }
    assert_eq!(layer.entries(), expected);
    assert_eq!(read(&layer, b"a/big"), vec![5; 300_000]);
    assert_eq!(read(&layer, b"a/empty"), b"");
    assert!(layer.copy(0, &mut Vec::new()).is_err());
    assert!(layer.copy(1_000, &mut Vec::new()).is_err());
}

#[tokio::test]
async fn a_layer_keeps_every_name_a_guest_can_give() {
    let (world, image) = pictured().await;
    let deep = [b"deep".to_vec(), vec![b'd'; 255], vec![b'e'; 255], vec![b'f'; 255]].join(&b'/');
    let endless = vec![b"x".to_vec(); 20_000].join(&b'/');
    let mut made = Made::default();
    let hostile: [&[u8]; 15] = [
        b"two\nlines",
        b"11 path=evil\n",
        b"not utf-8 \xff\xfe",
        "ümläut/日本".as_bytes(),
        b" spaces ",
        b"trailing.",
        b"\\",
        b"=",
        b"...",
        b"-rf",
        b"*",
        b".wh.literal",
        b".wh..wh..opq",
        &deep,
        &endless,
    ];
    for name in hostile {
        made = made.file(name, name);
    }
    made = made.add("link", ChangeKind::Symlink { target: vec![b't'; 4095] });
    let long = [b'n'; 255];
    made = made.removed(long);
    let made = made.sorted();
    let (path, layer) = layered(&world, &image, &made).await;
    let names = |changes: &dyn Changes| -> Vec<(Vec<u8>, ChangeKind)> {
        changes.entries().iter().map(|c| (c.path.clone(), c.kind.clone())).collect()
    };
    assert_eq!(names(&layer), names(&made));
    for name in hostile {
        assert_eq!(read(&layer, name), name);
    }
    // An opinion other than ours.
    let seen = std::process::Command::new("tar")
        .args(["--quoting-style=literal", "--null", "-tf"])
        .arg(path)
        .output()
        .unwrap();
    let seen: Vec<&[u8]> = seen.stdout.split(|byte| *byte == b'\n').collect();
    for name in [b"not utf-8 \xff\xfe".as_slice(), b" spaces ", &deep] {
        assert!(seen.contains(&name), "{}", String::from_utf8_lossy(name));
    }
}

#[tokio::test]
async fn other_tools_unpack_a_layer_to_the_same_files() {
    use std::os::unix::fs::MetadataExt;
    let (world, image) = pictured().await;
    let (path, _) = layered(&world, &image, &one_of_everything()).await;
    let to = tempfile::tempdir().unwrap();
    let status = std::process::Command::new("tar")
        .arg("-xpf")
        .arg(path)
        .arg("-C")
        .arg(to.path())
        .status()
        .unwrap();
    assert!(status.success());
    let at = |name: &str| to.path().join(name).symlink_metadata().unwrap();
    assert_eq!(
        (at("a").mode() & 0o7777, at("a").uid(), at("a").gid()),
        (0o1777, 12, 4_000_000_000)
    );
    assert_eq!(
        (at("a/setuid").mode() & 0o7777, at("a/setuid").mtime_nsec()),
        (0o4755, 123_000_000)
    );
    assert_eq!(at("a/big").ino(), at("a/zlink").ino());
    assert_eq!(at("e").rdev(), rustix::fs::makedev(259, 1_048_575));
    assert_eq!((at("old").mtime(), at("old").mtime_nsec()), (-2, 500_000_000));
    let target = std::fs::read_link(to.path().join("b")).unwrap();
    assert_eq!(target.as_os_str().as_bytes(), b"/nowhere/\xff");
    assert!(to.path().join("etc/.wh.hostname").exists());
    assert!(to.path().join("a/.wh..wh..opq").exists());
}

#[tokio::test]
async fn a_socket_is_left_out_and_hides_what_it_replaced() {
    let (world, image) = pictured().await;
    let made = Made::default().add("etc/hostname", ChangeKind::Socket);
    let (_, layer) = layered(&world, &image, &made).await;
    assert_eq!(layer.entries()[0].kind, ChangeKind::Removed);
}

#[tokio::test]
async fn a_file_that_is_longer_than_it_said_is_no_layer() {
    let (world, image) = pictured().await;
    let memory = commit(&world, &image).await;
    let made =
        Made::default().file("x", "four").with(|change| change.kind = ChangeKind::File { size: 3 });
    let error = world.saves.files_of(&memory, made.boxed()).await.unwrap_err();
    assert!(matches!(error, StoreError::Failed { .. }), "{error:?}");
    assert_eq!(world.leftovers().0, Vec::<String>::new());
}

fn open_layer(tar: Vec<u8>) -> Result<LayerChanges, StoreError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(LAYER_FILE), tar).unwrap();
    LayerChanges::open(dir.path())
}

#[test]
fn layers_of_others_are_understood_in_any_order() {
    let layer = open_layer(
        Tar::default()
            .hardlink("a", "z")
            .hardlink("b", "z")
            .file("z", b"content")
            .file("dir/new", b"")
            .file("dir/.wh..wh..opq", b"")
            .file("kept", b"")
            .file(".wh.kept", b"")
            .dir("again")
            .file(".wh.again", b"")
            .file(".wh..wh.plnk", b"")
            .end(),
    );
    let layer = layer.unwrap();
    let kind = |path: &str| {
        let found = layer.entries().iter().find(|change| change.path == path.as_bytes());
        found.map(|change| change.kind.clone())
    };
    assert_eq!(kind("a"), Some(ChangeKind::File { size: 7 }));
    assert_eq!(kind("b"), Some(ChangeKind::HardLink { to: b"a".into() }));
    assert_eq!(kind("z"), Some(ChangeKind::HardLink { to: b"a".into() }));
    assert_eq!(read(&layer, b"a"), b"content");
    assert_eq!(kind("dir"), Some(ChangeKind::Directory { opaque: true }));
    assert_eq!(kind("kept"), Some(ChangeKind::File { size: 0 }));
    assert_eq!(kind("again"), Some(ChangeKind::Directory { opaque: true }));
    assert_eq!(layer.entries().len(), 7);
}

#[test]
fn hostile_layers_are_refused() {
    let bad = [
        Tar::default().file("../x", b"").end(),
        Tar::default().hardlink("a", "gone").end(),
        Tar::default().hardlink("a", "a").end(),
        Tar::default().hardlink("a", "b").hardlink("b", "a").end(),
        Tar::default().dir("d").hardlink("e", "d").end(),
        b"this is no archive".repeat(100),
    ];
    for (index, tar) in bad.into_iter().enumerate() {
        let error = open_layer(tar).unwrap_err();
        assert!(matches!(error, StoreError::Invalid(_)), "{index}: {error:?}");
    }
}
