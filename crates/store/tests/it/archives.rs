//! Archives by friends and by enemies. Whatever is in one, nothing lands outside its image, and a
//! refusal leaves nothing behind.

use std::path::Path;

use torpor_lifecycle::store::StoreError;
use torpor_store::{ImageConfig, Limits};

use crate::world::{Tar, World, facts, gzip, quiet, sample, tarred};

/// Imports and expects a refusal that says this; nothing may be left.
async fn refused(world: &World, tar: Vec<u8>, why: &str) {
    for result in [world.import_tar(tar.clone()).await, world.import_any(tar).await] {
        let error = result.expect_err(why);
        assert!(matches!(error, StoreError::Invalid(_)), "{why}: {error:?}");
        assert!(error.to_string().contains(why), "{why:?} is not in {error}");
        assert_eq!(world.leftovers(), (vec![], vec![]), "{why}");
    }
}

#[tokio::test]
async fn a_root_filesystem_is_the_same_image_however_it_is_packed() {
    let (world, source) = (World::new().await, tempfile::tempdir().unwrap());
    sample(source.path());
    let tar = tarred(source.path());
    let plain = world.import_tar(tar.clone()).await.unwrap();
    assert_eq!(world.import_tar(gzip(&tar)).await.unwrap().id, plain.id);
    assert_eq!(world.import_any(gzip(&tar)).await.unwrap().id, plain.id);
}

#[tokio::test]
async fn names_that_lead_out_are_refused() {
    let world = World::new().await;
    for name in ["../evil", "a/../../evil", "/../evil", "a/.."] {
        refused(&world, Tar::default().file(name, b"x").end(), "contains \"..\"").await;
    }
    refused(&world, Tar::default().pax("path", "../evil").file("ok", b"x").end(), "\"..\"").await;
    let long = Tar::default().entry(b'L', "long", "", b"../evil\0").file("ok", b"x").end();
    refused(&world, long, "contains \"..\"").await;
}

#[tokio::test]
async fn an_absolute_name_is_a_place_in_the_image() {
    let world = World::new().await;
    let tar = Tar::default().file("/etc/torpor-test-absolute", b"x").end();
    let image = world.import_tar(tar).await.unwrap();
    assert!(!Path::new("/etc/torpor-test-absolute").exists());
    let out = world.extract(&image.id).await;
    assert!(out.path().join("etc/torpor-test-absolute").exists());
}

#[tokio::test]
async fn writing_through_a_link_stays_in_the_image() {
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap();
    let up = format!("../../../../../../../../..{target}");
    let inside = target.trim_start_matches('/');
    for link in [target, &up] {
        let world = World::new().await;
        let tar = Tar::default()
            .dir(inside)
            .symlink("a", link)
            .symlink("b", "a")
            .file("b/owned", b"x")
            .end();
        let image = world.import_tar(tar).await.unwrap();
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
        let out = world.extract(&image.id).await;
        assert!(out.path().join(inside).join("owned").exists());
    }
    // If the place is not in the image either, there is nothing to write to.
    let world = World::new().await;
    let tar = Tar::default().symlink("a", target).file("a/owned", b"x").end();
    refused(&world, tar, "link to nowhere").await;
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn an_entry_replaces_a_link_and_does_not_follow_it() {
    let outside = tempfile::NamedTempFile::new().unwrap();
    let target = outside.path().to_str().unwrap();
    let world = World::new().await;
    let tar = Tar::default().symlink("passwd", target).file("passwd", b"mine").end();
    let image = world.import_tar(tar).await.unwrap();
    assert_eq!(std::fs::read(outside.path()).unwrap(), b"");
    let out = world.extract(&image.id).await;
    assert_eq!(std::fs::read(out.path().join("passwd")).unwrap(), b"mine");
}

#[tokio::test]
async fn hard_links_stay_within_the_image() {
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(outside.path(), "secret").unwrap();
    let target = outside.path().to_str().unwrap();
    let world = World::new().await;
    refused(&world, Tar::default().hardlink("a", target).end(), "not there").await;
    let up = format!("../../../../../../..{target}");
    refused(&world, Tar::default().hardlink("a", &up).end(), "contains \"..\"").await;
    refused(&world, Tar::default().dir("d").hardlink("a", "d").end(), "a directory").await;
    refused(&world, Tar::default().file("a", b"x").hardlink("a", "a").end(), "itself").await;
    // A hard link to a symbolic link is that link, not what it points to.
    let tar = Tar::default().symlink("s", target).hardlink("a", "s").end();
    let image = world.import_tar(tar).await.unwrap();
    let out = world.extract(&image.id).await;
    assert_eq!(std::fs::read_link(out.path().join("a")).unwrap(), outside.path());
}

#[tokio::test]
async fn an_archive_can_change_its_mind() {
    let world = World::new().await;
    let tar = Tar::default()
        .file("a", b"first")
        .file("a", b"second")
        .dir("d")
        .file("d/x", b"x")
        .file("d", b"now a file")
        .file("e", b"a file")
        .dir("e")
        .file("e/x", b"x")
        .end();
    let image = world.import_tar(tar).await.unwrap();
    let out = world.extract(&image.id).await;
    assert_eq!(std::fs::read(out.path().join("a")).unwrap(), b"second");
    assert_eq!(std::fs::read(out.path().join("d")).unwrap(), b"now a file");
    assert_eq!(std::fs::read(out.path().join("e/x")).unwrap(), b"x");
}

#[tokio::test]
async fn what_cannot_be_a_tree_is_refused() {
    let world = World::new().await;
    let tar = Tar::default().file("a", b"x").file("a/b", b"x").end();
    refused(&world, tar, "not a directory").await;
    let circle = Tar::default().symlink("a", "b").symlink("b", "a").file("a/x", b"x").end();
    refused(&world, circle, "in a circle").await;
    refused(&world, Tar::default().file(".", b"x").end(), "the root is a directory").await;
    refused(&world, Tar::default().symlink("a", "").end(), "not valid").await;
    let deep = "d/".repeat(40);
    let tar = Tar::default().pax("path", &deep.repeat(7)).dir("x").end();
    refused(&world, tar, "too deep").await;
    let tar = Tar::default().pax("path", &"x".repeat(300)).file("x", b"").end();
    refused(&world, tar, "too long").await;
    refused(&world, Tar::default().entry(b'S', "sparse", "", b"").end(), "sparse").await;
    refused(&world, Tar::default().entry(b'Z', "odd", "", b"").end(), "is not known").await;
    let tar = Tar::default().pax("GNU.sparse.realsize", "1099511627776").file("x", b"").end();
    refused(&world, tar, "sparse").await;
    refused(&world, Tar::default().pax("uid", "4294967296").file("x", b"").end(), "owner").await;
    let size = (u64::MAX - 511).to_string();
    refused(&world, Tar::default().pax("size", &size).file("x", b"").end(), "impossible").await;
}

#[tokio::test]
async fn extended_headers_without_an_entry_are_counted() {
    let world = World::new().await;
    for kind in *b"xgLKV" {
        let start = Tar::default().file("a", b"x");
        let tar = (0..20).fold(start, |tar, _| tar.entry(kind, "more", "", b"")).file("b", b"x");
        refused(&world, tar.end(), "more than 16 extended headers").await;
    }
    let some =
        (0..9).fold(Tar::default(), |tar, n| tar.pax("path", &format!("f{n}")).file("x", b"1"));
    world.import_tar(some.end()).await.unwrap();
}

#[tokio::test]
async fn an_archive_that_lies_about_sizes_is_refused() {
    let world = World::new().await;
    // More than there is.
    let tar = Tar::default().pax("size", "1099511627776").file("a", b"x").end();
    refused(&world, tar, "the archive").await;
    // Less than there is: content would be taken for headers.
    let content = Tar::default().file("smuggled", b"x").end();
    let mut content = [vec![b'x'; 512], content].concat();
    content[512 + 148] = b'9';
    refused(&world, Tar::default().pax("size", "512").file("a", &content).end(), "checksum").await;
    // Junk where a number should be.
    refused(&world, Tar::default().pax("size", "-1").file("a", b"x").end(), "damaged").await;
    // An extended header that wants to be held in memory.
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::XHeader);
    header.set_size(8 << 30);
    header.set_cksum();
    refused(&world, header.as_bytes().to_vec(), "extended header").await;
}

#[tokio::test]
async fn what_is_no_archive_is_refused() {
    let world = World::new().await;
    refused(&world, b"hello, I am a text".repeat(100), "no tar archive").await;
    refused(&world, vec![], "empty").await;
    refused(&world, vec![0; 2048], "empty").await;
    refused(&world, Tar::default().file("a", &[1; 2000]).end()[..1024].to_vec(), "cut off").await;
    let mut zipped = gzip(&Tar::default().file("a", &[1; 200_000]).end());
    zipped.truncate(zipped.len() / 2);
    refused(&world, zipped, "can't be read").await;
    for (magic, name) in [(&b"\xfd7zXZ\0 rest"[..], "xz"), (b"BZh9 rest", "bzip2")] {
        refused(&world, magic.to_vec(), name).await;
    }
}

#[tokio::test]
async fn limits_hold() {
    let limits = Limits { bytes: 10_000, entries: 5, ..Limits::default() };
    let world = World::with_limits(limits).await;
    refused(&world, Tar::default().file("a", &[1; 20_000]).end(), "more than 10000 bytes").await;
    let mut tar = Tar::default();
    for index in 0..6 {
        tar = tar.dir(&format!("d{index}"));
    }
    refused(&world, tar.end(), "more than 5 entries").await;
    let mut ignored = Tar::default();
    for index in 0..6 {
        ignored = ignored.dir(&format!("dev/{index}"));
    }
    refused(&world, ignored.end(), "more than 5 entries").await;
}

#[tokio::test]
async fn a_bomb_does_not_go_off() {
    use std::io::Read;
    let world = World::new().await;
    let mut header = tar::Header::new_ustar();
    header.set_path("bomb").unwrap();
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(4 << 30);
    header.set_cksum();
    let zeros = std::io::repeat(0).take(200 << 20);
    let mut source = header.as_bytes().chain(zeros);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::copy(&mut source, &mut encoder).unwrap();
    refused(&world, encoder.finish().unwrap(), "grows more than 200 times").await;
}

#[tokio::test]
async fn devices_in_an_archive_are_left_out() {
    let world = World::new().await;
    let tar = Tar::default()
        .dir("etc")
        .entry(b'3', "etc/char", "", b"")
        .entry(b'4', "etc/block", "", b"")
        .entry(b'6', "etc/fifo", "", b"")
        .file("etc/file", b"x")
        .end();
    let image = world.import_tar(tar).await.unwrap();
    let out = world.extract(&image.id).await;
    assert_eq!(crate::world::names(&out.path().join("etc")), ["file"]);
}

#[tokio::test]
async fn places_of_engine_and_agent_are_ignored_in_archives() {
    let world = World::new().await;
    let tar = Tar::default()
        .dir("proc")
        .file("proc/version", b"x")
        .file("sys/kernel", b"x")
        .file("dev/null", b"x")
        .file(".torpor/agent", b"an impostor")
        .symlink("evil", ".torpor")
        .end();
    let image = world.import_tar(tar).await.unwrap();
    let out = world.extract(&image.id).await;
    assert_eq!(std::fs::read(out.path().join(".torpor/agent")).unwrap(), crate::world::AGENT);
    for dir in ["proc", "sys", "dev"] {
        assert_eq!(std::fs::read_dir(out.path().join(dir)).unwrap().count(), 0, "{dir}");
    }
    // Not through a link either, in any order.
    let tar = Tar::default().symlink("evil", ".torpor").file("evil/agent", b"x").end();
    refused(&World::new().await, tar, "link to nowhere").await;
    let tar = Tar::default().symlink("proc", "/etc").symlink("tmp", "/nowhere").end();
    let image = world.import_tar(tar).await.unwrap();
    let out = world.extract(&image.id).await;
    assert!(out.path().join("proc").symlink_metadata().unwrap().is_dir());
    assert_eq!(facts(&out.path().join("tmp")).0, 0o1777);
}

#[tokio::test]
async fn extended_headers_are_understood() {
    let world = World::new().await;
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(200));
    let tar = Tar::default()
        .pax("path", &long)
        .pax("mtime", "1234567890.75")
        .pax("uid", "70000")
        .file("short", b"x")
        .entry(b'g', "global", "", b"14 comment=hi\n")
        .entry(b'L', "long", "", format!("{}\0", "g".repeat(150)).as_bytes())
        .file("g", b"y")
        .end();
    let image = world.import_tar(tar).await.unwrap();
    let out = world.extract(&image.id).await;
    assert_eq!(facts(&out.path().join(long)), (0o644, 70_000, 0, 1_234_567_890));
    assert!(out.path().join("g".repeat(150)).exists());
}

/// Gives a few bytes at a time, as a network does.
struct Dribble(std::io::Cursor<Vec<u8>>);

impl std::io::Read for Dribble {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer.len().min(7);
        self.0.read(&mut buffer[..most])
    }
}

#[tokio::test]
async fn a_slow_stream_is_the_same_image() {
    let world = World::new().await;
    let tar = Tar::default().dir("etc").file("etc/a", &[5; 3000]).symlink("b", "etc/a").end();
    let whole = world.import_tar(tar.clone()).await.unwrap();
    for bytes in [tar.clone(), gzip(&tar)] {
        let slow = Dribble(std::io::Cursor::new(bytes));
        let config = ImageConfig::default();
        let image =
            world.images.import_tar_stream(None, slow, config, u64::MAX, quiet()).await.unwrap();
        assert_eq!(image.id, whole.id);
    }
}

#[tokio::test]
async fn random_damage_is_refused_or_harmless() {
    let world = World::new().await;
    let tar = Tar::default()
        .dir("etc")
        .file("etc/a", &[5; 700])
        .pax("path", "etc/b")
        .file("b", b"y")
        .symlink("c", "etc")
        .hardlink("d", "etc/a")
        .end();
    // Every byte of a header means something else.
    for at in (0..tar.len()).step_by(37) {
        let mut damaged = tar.clone();
        damaged[at] ^= 0x55;
        match world.import_tar(damaged).await {
            Ok(_) | Err(StoreError::Invalid(_)) => {}
            Err(error) => panic!("byte {at}: {error:?}"),
        }
    }
    assert_eq!(world.leftovers().0, Vec::<String>::new());
}
