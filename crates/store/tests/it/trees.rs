//! The files of a save as a tree on top of its image, and what differs between two.

use std::io::{self, Write};

use torpor_lifecycle::engine::ChangeKind;
use torpor_protocol::ImageId;
use torpor_protocol::snapshot::{Difference, FileDifference};
use torpor_store::{SavedTree, TreeError};

use crate::files::Made;
use crate::saves::pictured;
use crate::world::World;

async fn tree_of(world: &World, image: &ImageId, made: &Made) -> SavedTree {
    SavedTree::new(&world.root_file(image).await, made.boxed()).unwrap()
}

fn listed(tree: &SavedTree, path: &str, depth: u32) -> Vec<String> {
    tree.list(path, depth).unwrap().into_iter().map(|entry| entry.path).collect()
}

fn content(tree: &SavedTree, path: &str) -> Result<Vec<u8>, TreeError> {
    let mut out = Vec::new();
    let size = tree.copy(path, &mut out)?;
    assert_eq!(size, out.len() as u64);
    Ok(out)
}

#[tokio::test]
async fn an_image_without_changes_is_shown_as_it_is() {
    let (world, image) = pictured().await;
    let tree = tree_of(&world, &image, &Made::default()).await;
    let root = ["bin", "dev", "etc", "home", "proc", "run", "sys", "tmp", "usr"];
    assert_eq!(listed(&tree, "/", 1), root);
    assert_eq!(listed(&tree, "/tmp", 1), Vec::<String>::new());
    assert_eq!(listed(&tree, "/home", 9), ["user", "user/link", "user/notes"]);
    assert_eq!(listed(&tree, "/bin", 1), ["sudo", "sudoedit"]);
    assert_eq!(listed(&tree, "/usr", 0), Vec::<String>::new());
    assert_eq!(content(&tree, "/etc/hostname").unwrap(), b"box\n");
    assert_eq!(content(&tree, "/bin/sudo").unwrap(), vec![7; 10_000]);
    let notes = tree.stat("/home/user/notes").unwrap();
    assert_eq!((notes.mode, notes.uid, notes.gid, notes.size), (0o644, 1000, 1001, 0));
    assert_eq!(notes.modified_at_ms, 1_000_000_000_000);
    let link = tree.stat("/home/user/link").unwrap();
    assert_eq!((link.kind.as_str(), link.target.as_deref()), ("symlink", Some("/nowhere")));
    assert_eq!(tree.diff_image().unwrap(), []);
}

#[tokio::test]
async fn changes_are_shown_on_top_of_the_image() {
    let (world, image) = pictured().await;
    let made = Made::default()
        .file("etc/hostname", "changed")
        .file("etc/new", "n")
        .removed("home/user/notes")
        // A directory where a link was, and a file where a directory was.
        .dir("bin", false)
        .file("bin/tool", "t")
        .file("run", "a file now")
        // Nothing of the image's directory shines through, and something on top.
        .dir("usr", true)
        .dir("usr/share", false)
        .add("usr/share/hard", ChangeKind::HardLink { to: b"etc/new".into() })
        .file(b"usr/share/odd\xff", "o");
    let tree = tree_of(&world, &image, &made).await;
    assert_eq!(listed(&tree, "/etc", 1), ["hostname", "new"]);
    assert_eq!(listed(&tree, "/home", 9), ["user", "user/link"]);
    assert_eq!(listed(&tree, "/usr", 9), ["share", "share/hard", "share/odd\u{fffd}"]);
    assert_eq!(listed(&tree, "/bin", 9), ["tool"]);
    assert_eq!(content(&tree, "/etc/hostname").unwrap(), b"changed");
    assert_eq!(content(&tree, "/usr/share/hard").unwrap(), b"n");
    assert_eq!(content(&tree, "/run").unwrap(), b"a file now");
    assert_eq!(tree.stat("/usr/share/hard").unwrap().kind, "file");
    assert_eq!(tree.stat("/bin").unwrap().kind, "directory");
    for gone in ["/home/user/notes", "/usr/bin", "/usr/bin/sudo", "/run/x", "/nothing"] {
        let error = tree.stat(gone).unwrap_err();
        assert!(matches!(&error, TreeError::NoSuchPath(path) if path == gone), "{gone}: {error:?}");
    }
}

#[tokio::test]
async fn odd_changes_are_taken_for_what_they_can_only_mean() {
    let (world, image) = pictured().await;
    let made = Made::default()
        // Nothing is said of the directories on the way.
        .file("fresh/deep/file", "f")
        .file("etc/hostname/inside", "i")
        // Removed from where nothing can be.
        .removed("home/user/notes/x")
        .removed("never/there");
    let tree = tree_of(&world, &image, &made).await;
    assert_eq!(listed(&tree, "/fresh", 9), ["deep", "deep/file"]);
    assert_eq!(listed(&tree, "/etc/hostname", 9), ["inside"]);
    assert_eq!(tree.stat("/home/user/notes").unwrap().kind, "file");
    assert!(matches!(tree.stat("/never"), Err(TreeError::NoSuchPath(_))));
    let expected =
        ["~/etc/hostname", "+/etc/hostname/inside", "+/fresh", "+/fresh/deep", "+/fresh/deep/file"];
    assert_eq!(told(&tree.diff_image().unwrap()), expected);
}

#[tokio::test]
async fn paths_of_users_stay_in_the_tree() {
    let (world, image) = pictured().await;
    let link = |target: &str| ChangeKind::Symlink { target: target.into() };
    let made = Made::default()
        .add("loop", link("loop"))
        .add("up", link("../../../etc"))
        .add("abs", link("/etc/../usr/bin"))
        .add("host", link("/etc/passwd"));
    let tree = tree_of(&world, &image, &made).await;
    for same in ["/etc/hostname", "//etc/./hostname", "/../etc/x/../hostname", "/up/hostname"] {
        assert_eq!(content(&tree, same).unwrap(), b"box\n", "{same}");
    }
    assert_eq!(content(&tree, "/abs/sudo").unwrap().len(), 10_000);
    assert_eq!(tree.stat("/").unwrap().kind, "directory");
    assert_eq!(tree.stat("/..").unwrap().kind, "directory");
    let not_file = |path: &str| matches!(content(&tree, path), Err(TreeError::NotAFile(_)));
    assert!(not_file("/host") && not_file("/etc") && not_file("/loop"));
    assert!(matches!(tree.list("/etc/hostname", 1), Err(TreeError::NotADirectory(_))));
    assert!(matches!(tree.list("/host", 1), Err(TreeError::NoSuchPath(_))));
    assert!(matches!(tree.stat("/etc/hostname/x"), Err(TreeError::NoSuchPath(_))));
    let long = format!("/{}", "x/".repeat(40_000));
    for bad in ["", "etc", "/a\0b", "/loop/x", &long] {
        assert!(matches!(tree.stat(bad), Err(TreeError::BadPath { .. })), "{bad:.20}");
    }
}

#[tokio::test]
async fn whoever_stops_reading_is_told_apart_from_a_broken_save() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (world, image) = pictured().await;
    let tree = tree_of(&world, &image, &Made::default().file("new", "n")).await;
    for path in ["/new", "/bin/sudo"] {
        let error = tree.copy(path, &mut Full).unwrap_err();
        assert!(matches!(error, TreeError::Output(_)), "{error:?}");
    }
}

#[tokio::test]
async fn a_tree_of_any_depth_is_walked() {
    let (world, image) = pictured().await;
    let mut made = Made::default();
    let mut path = Vec::new();
    for _ in 0..5_000 {
        path.extend_from_slice(if path.is_empty() { b"d" } else { b"/d" });
        made = made.dir(&path, false);
    }
    let tree = tree_of(&world, &image, &made).await;
    assert_eq!(listed(&tree, "/d", u32::MAX).len(), 4_999);
    assert_eq!(tree.diff_image().unwrap().len(), 5_000);
}

// === Differences ===

fn told(found: &[FileDifference]) -> Vec<String> {
    let mark = |change| match change {
        Difference::Added => '+',
        Difference::Modified => '~',
        Difference::Removed => '-',
    };
    found.iter().map(|one| format!("{}{}", mark(one.change), one.path)).collect()
}

#[tokio::test]
async fn what_a_sandbox_changed_is_told_and_nothing_else() {
    let (world, image) = pictured().await;
    let made = Made::default()
        // Written again with the same content, owner and mode: only its time is another.
        .file("etc/hostname", "box\n")
        .dir("etc", false)
        .file("etc/new", "n")
        .file("home/user/notes", "more")
        .removed("usr/bin/sudoedit")
        .removed("usr/never-there")
        .dir("bin", true)
        .file("bin/sh", "x")
        .add("home/user/link", ChangeKind::Symlink { target: b"/elsewhere".into() })
        .file("tmp/.torpor", "ours");
    let tree = tree_of(&world, &image, &made).await;
    let found = tree.diff_image().unwrap();
    let expected = [
        "~/bin",
        "+/bin/sh",
        "+/etc/new",
        "~/home/user/link",
        "~/home/user/notes",
        "-/usr/bin/sudoedit",
    ];
    assert_eq!(told(&found), expected);
    let notes = &found[4];
    assert_eq!(notes.before.as_ref().map(|entry| (entry.size, entry.uid)), Some((0, 1000)));
    assert_eq!(notes.after.as_ref().map(|entry| (entry.size, entry.uid)), Some((4, 0)));
    let added = &found[2];
    assert!(added.before.is_none() && added.after.as_ref().unwrap().path == "/etc/new");
}

#[tokio::test]
async fn two_snapshots_of_the_same_image_are_compared_by_what_they_changed() {
    let (world, image) = pictured().await;
    let base = Made::default().file("same", "equal").file("etc/a", "12345").file("gone", "x");
    let before = tree_of(&world, &image, &base).await;
    let made = Made::default()
        .file("same", "equal")
        .file("etc/a", "54321")
        .file("etc/hostname", "other")
        .dir("usr", true)
        .file("mode", "m");
    let after = tree_of(&world, &image, &made).await;
    let expected = [
        "~/etc/a",
        "~/etc/hostname",
        "-/gone",
        "+/mode",
        "-/usr/bin",
        "-/usr/bin/sudo",
        "-/usr/bin/sudoedit",
    ];
    assert_eq!(told(&before.diff(&after).unwrap()), expected);
    let back: Vec<_> = told(&after.diff(&before).unwrap());
    assert_eq!(back.len(), expected.len());
    assert!(back.contains(&"+/usr/bin/sudo".to_owned()) && back.contains(&"-/mode".to_owned()));
    assert_eq!(before.diff(&before).unwrap(), []);
}

#[tokio::test]
async fn owner_and_permissions_are_differences_and_links_to_equal_content_are_not() {
    let (world, image) = pictured().await;
    let base = Made::default().file("a", "1").file("b", "1").file("c", "1").file("d", "1");
    let before = tree_of(&world, &image, &base).await;
    let made = Made::default()
        .file("a", "1")
        .with(|change| change.mode = 0o600)
        .file("b", "1")
        .with(|change| change.uid = 7)
        .file("c", "1")
        .with(|change| change.modified_at_ms = 1)
        .add("d", ChangeKind::HardLink { to: b"c".into() });
    let after = tree_of(&world, &image, &made).await;
    assert_eq!(told(&before.diff(&after).unwrap()), ["~/a", "~/b"]);
}

#[tokio::test]
async fn snapshots_of_different_images_are_compared_whole() {
    let (world, one) = pictured().await;
    let source = tempfile::tempdir().unwrap();
    crate::world::sample(source.path());
    std::fs::write(source.path().join("extra"), "x").unwrap();
    std::fs::remove_file(source.path().join("home/user/link")).unwrap();
    let two = world.import_dir("two", source.path()).await.unwrap().id;
    let before = tree_of(&world, &one, &Made::default()).await;
    // The same difference once in the image and once on top of it.
    let after = tree_of(&world, &two, &Made::default()).await;
    assert_eq!(told(&before.diff(&after).unwrap()), ["+/extra", "-/home/user/link"]);
    let made = Made::default().file("extra", "x").removed("home/user/link");
    let changed = tree_of(&world, &one, &made).await;
    assert_eq!(told(&changed.diff(&after).unwrap()), Vec::<String>::new());
}
