//! Files that are longer than their disk: a guest makes one with `truncate`, and nobody pays for it.

use std::io::{self, Cursor};
use std::ops::Range;

use torpor_lifecycle::engine::{Change, ChangeKind, Changes, See};
use torpor_lifecycle::store::{LAYER_FILE, Saves as _, StoreError};
use torpor_store::{LayerChanges, SavedTree};

use crate::files::Made;
use crate::saves::{bytes_read, commit, pictured};
use crate::snapshot_file::export;
use crate::world::{Tar, World, names, quiet};

const HUGE: u64 = 30 << 30;

/// Two files that are larger than any disk of a test, one of them with a few bytes.
fn huge() -> Made {
    let made = Made::default().sparse("huge", HUGE, &[(0, b"begin"), (10 << 30, &[7; 5000])]);
    made.sparse("nothing", HUGE, &[]).file("plain", "text")
}

/// The pieces of a file and where they are, but for what is zeros.
fn data(changes: &dyn Changes, path: &str) -> Vec<(u64, u8)> {
    let index = changes.entries().iter().position(|it| it.path == path.as_bytes()).unwrap();
    let mut found = Vec::new();
    let see: See<'_> = &mut |at, piece| {
        let bytes = piece.iter().zip(at..).filter(|(byte, _)| **byte != 0);
        found.extend(bytes.map(|(byte, at)| (at, *byte)));
        Ok(())
    };
    changes.read(index, see).unwrap();
    found
}

fn assert_huge(layer: &LayerChanges) {
    let kinds: Vec<_> = layer.entries().iter().map(|change| change.kind.clone()).collect();
    let file = |size| ChangeKind::File { size };
    assert_eq!(kinds, [file(HUGE), file(HUGE), file(4)]);
    assert_eq!(layer.data(0).unwrap(), [0..4096, 10 << 30..(10 << 30) + 8192]);
    assert_eq!(layer.data(1).unwrap(), [0..0; 0]);
    let found = data(layer, "huge");
    assert_eq!(found[..5], [(0, b'b'), (1, b'e'), (2, b'g'), (3, b'i'), (4, b'n')]);
    let sevens: Vec<_> = (0..5000).map(|at| ((10 << 30) + at, 7)).collect();
    assert_eq!(found[5..], sevens);
}

#[tokio::test]
async fn a_file_longer_than_its_disk_is_saved_and_exported_without_its_holes() {
    let (here, image) = pictured().await;
    let memory = commit(&here, &image).await;
    let before = bytes_read();
    let save = here.saves.files_of(&memory, huge().boxed()).await.unwrap();
    assert!(save.manifest.size_bytes() < 100_000, "{:?}", save.manifest);
    assert!(save.dir.join(LAYER_FILE).metadata().unwrap().len() < 100_000);
    assert_huge(&LayerChanges::open(&save.dir).unwrap());

    let bytes = export(&here, &image, &save, true).await;
    assert!(bytes.len() < 1 << 20, "{}", bytes.len());
    let there = World::new().await;
    let imported = there.saves.import(&there.images, Cursor::new(bytes)).await.unwrap();
    assert_huge(&LayerChanges::open(&imported.save.dir).unwrap());
    assert!(bytes_read() - before < 10 << 20, "{}", bytes_read() - before);
}

#[tokio::test]
async fn the_tar_program_finds_the_holes_of_a_layer() {
    let (world, image) = pictured().await;
    let memory = commit(&world, &image).await;
    let long = "d/".repeat(80) + "long";
    let made = Made::default().sparse(&long, 64 << 20, &[(8 << 20, b"middle")]);
    let save = world.saves.files_of(&memory, made.boxed()).await.unwrap();
    let to = tempfile::tempdir().unwrap();
    let mut tar = std::process::Command::new("tar");
    tar.arg("-xf").arg(save.dir.join(LAYER_FILE)).arg("-C").arg(to.path());
    assert!(tar.status().unwrap().success());
    let content = std::fs::read(to.path().join(long)).unwrap();
    assert_eq!(content.len(), 64 << 20);
    assert_eq!(content[8 << 20..(8 << 20) + 6], *b"middle");
    assert_eq!(content.iter().filter(|byte| **byte != 0).count(), 6);
}

#[tokio::test]
async fn holes_are_compared_without_reading_them_and_are_as_good_as_zeros() {
    let (world, image) = pictured().await;
    let root = world.root_file(&image).await;
    let tree = |made: Made| SavedTree::new(&root, made.boxed()).unwrap();
    let at = (20u64 << 30) + 5;
    let before = tree(huge().sparse("odd", HUGE, &[(at, b"12345")]));
    let zeros = vec![0; 10_000];
    let pieces: [(u64, &[u8]); 3] =
        [(at - 3, b"\0\0\x0012"), (at + 2, b"345\0"), (at + 5000, &zeros)];
    let same = tree(huge().sparse("odd", HUGE, &pieces));
    assert_eq!(before.diff(&same).unwrap(), []);
    for pieces in [&[(at, &b"1234x"[..])], &[(at + 1, &b"12345"[..])], &[(at, &b"123450x"[..])]] {
        let other = tree(huge().sparse("odd", HUGE, pieces));
        let found = before.diff(&other).unwrap();
        let paths: Vec<_> = found.iter().map(|it| it.path.as_str()).collect();
        assert_eq!(paths, ["/odd"], "{pieces:?}");
    }
}

/// One file that says anything of itself.
struct Liar(Vec<Change>, Vec<Range<u64>>, Vec<(u64, Vec<u8>)>);

impl Changes for Liar {
    fn entries(&self) -> &[Change] {
        &self.0
    }

    fn data(&self, _: usize) -> io::Result<Vec<Range<u64>>> {
        Ok(self.1.clone())
    }

    fn read(&self, _: usize, see: See<'_>) -> io::Result<()> {
        self.2.iter().try_for_each(|(at, piece)| see(*at, piece))
    }
}

async fn refused(size: u64, data: &[Range<u64>], pieces: &[(u64, &[u8])]) -> String {
    let (world, image) = pictured().await;
    let memory = commit(&world, &image).await;
    let entries = Made::default().sparse("file", size, &[]).boxed().entries().to_vec();
    let pieces = pieces.iter().map(|(at, piece)| (*at, piece.to_vec())).collect();
    let liar = Liar(entries, data.to_vec(), pieces);
    let error = world.saves.files_of(&memory, Box::new(liar)).await.unwrap_err();
    assert_eq!(world.saves.bytes().await.unwrap(), memory.manifest.size_bytes());
    assert_eq!(names(&world.dir.join("staging")), [""; 0]);
    format!("{error}: {error:?}")
}

#[tokio::test]
async fn more_data_than_the_disk_holds_fails_the_save_before_it_is_written() {
    // The disk of the sample has 10 GiB.
    let error = refused(HUGE, &[0..1, 1 << 20..11 << 30], &[]).await;
    assert!(error.contains("more data than its disk of 10737418240 bytes"), "{error}");
    // Runs that are too many for a map lose the gaps between them.
    let far: Vec<_> = (0..300_000).map(|n| n << 20..(n << 20) + 4096).collect();
    let error = refused(300_000 << 20, &far, &[]).await;
    assert!(error.contains("more data than its disk"), "{error}");
    let error = refused((16 << 40) + 1, &[], &[]).await;
    assert!(error.contains("longer than the 16 TiB"), "{error}");
}

#[tokio::test]
async fn data_where_a_file_said_to_have_none_fails_the_save() {
    for pieces in [&[(1 << 20, &b"x"[..])], &[(4095, &b"xy"[..])], &[(u64::MAX, &b"x"[..])]] {
        let error = refused(2 << 20, &[0..5, 5..4096], pieces).await;
        assert!(error.contains("data elsewhere"), "{pieces:?}: {error}");
    }
}

/// An image of a layer with one file of so many bytes, all holes.
async fn image_with(size: u64, room: u64) -> Result<u64, StoreError> {
    let (world, image) = pictured().await;
    let memory = commit(&world, &image).await;
    let made = Made::default().sparse("hole", size, &[(4096, b"data")]);
    let save = world.saves.files_of(&memory, made.boxed()).await.unwrap();
    let layer = std::fs::File::open(save.dir.join(LAYER_FILE)).unwrap();
    let layered =
        torpor_store::images::Layered { base: image.clone(), room, without: &[], built: None };
    let made = world.images.import_layer(None, layered, layer, quiet()).await?;
    let tree = SavedTree::new(&world.root_file(&made.id).await, Made::default().boxed()).unwrap();
    let mut content = Vec::new();
    tree.copy("/hole", &mut content).unwrap();
    assert_eq!(content[4096..4100], *b"data");
    assert_eq!(content.iter().filter(|byte| **byte != 0).count(), 4);
    Ok(content.len() as u64)
}

#[tokio::test]
async fn an_image_has_no_holes_and_is_refused_if_they_exceed_the_disk() {
    assert_eq!(image_with(3 << 20, 4 << 20).await.unwrap(), 3 << 20);
    let error = image_with(HUGE, 1 << 30).await.unwrap_err().to_string();
    assert!(error.contains("holes in files count"), "{error}");
}

#[tokio::test]
async fn layers_made_to_do_harm_are_refused() {
    let open = |tar: Vec<u8>| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(LAYER_FILE), tar).unwrap();
        LayerChanges::open(dir.path()).unwrap_err().to_string()
    };
    let sparse = |size: &str, map: &str, content: usize| {
        let mut body = map.as_bytes().to_vec();
        body.resize(512 + content, 0);
        let text = format!(
            "22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n{} GNU.sparse.realsize={size}\n",
            size.len() + 24
        );
        Tar::default().entry(b'x', "pax", "", text.as_bytes()).file("f", &body).end()
    };
    let error = open(sparse("1000000000", "1\n0\n4096\n", 8192));
    assert!(error.contains("another content"), "{error}");
    let error = open(sparse("20000000000000", "1\n0\n4096\n", 4096));
    assert!(error.contains("longer than the 16 TiB"), "{error}");
    let error = open(Tar::default().pax("size", "99999999999").file("f", b"").end());
    assert!(error.contains("ends before it does"), "{error}");
    let size = (u64::MAX - 100).to_string();
    let error = open(Tar::default().file("a", b"x").pax("size", &size).file("f", b"").end());
    assert!(error.contains("impossible"), "{error}");
}
