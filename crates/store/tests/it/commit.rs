//! What an import promises: the same tree is the same image, a commit is whole or not there, and a
//! damaged file is noticed.

use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use torpor_lifecycle::store::{Images as _, StoreError};
use torpor_store::ImageConfig;

use crate::world::{AGENT, World, facts, names, quiet, record, sample, set_mtime, tarred};

const NEWER_AGENT: &[u8] = b"#!/bin/true agent two, which is longer\n";

fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    sample(dir.path());
    dir
}

#[tokio::test]
async fn a_directory_becomes_an_image_with_everything_in_it() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("team/sample", source.path()).await.unwrap();
    assert_eq!(image.names, ["team/sample:latest"]);
    let out = world.extract(&image.id).await;
    let out = out.path();
    assert_eq!(std::fs::read(out.join("etc/hostname")).unwrap(), b"box\n");
    assert_eq!(facts(&out.join("home/user/notes")), (0o644, 1000, 1001, 1_000_000_000));
    assert_eq!(std::fs::read_link(out.join("bin")).unwrap(), Path::new("usr/bin"));
    assert_eq!(std::fs::read_link(out.join("home/user/link")).unwrap(), Path::new("/nowhere"));
    assert_eq!(facts(&out.join("bin")).3, 1_000_000_000);
    assert_eq!(facts(&out.join("tmp")).0, 0o1777);
    assert_eq!(std::fs::read(out.join(".torpor/agent")).unwrap(), AGENT);
    assert_eq!(facts(&out.join(".torpor/agent")).0, 0o755);
    for ignored in ["dev/null", "proc/version"] {
        assert!(!out.join(ignored).exists(), "{ignored}");
    }
    for made in ["sys", "run", "proc", "dev"] {
        assert!(out.join(made).is_dir(), "{made}");
    }
    assert_eq!(world.leftovers(), (vec![], vec![image.id.to_string()]));
}

#[tokio::test]
async fn the_same_tree_is_the_same_image() {
    let (world, one, two) = (World::new().await, tree(), tree());
    let first = world.import_dir("one", one.path()).await.unwrap();
    let second = world.import_dir("two", two.path()).await.unwrap();
    assert_eq!(first.id, second.id);
    assert_eq!(second.names, ["one:latest", "two:latest"]);
    assert_eq!(world.images.all().await.unwrap().len(), 1);
}

#[tokio::test]
async fn any_difference_that_matters_makes_another_image() {
    let world = World::new().await;
    let plain = tree();
    let mut ids = vec![world.import_dir("plain", plain.path()).await.unwrap().id];
    let changes: [fn(&Path); 6] = [
        |dir| std::fs::write(dir.join("new"), "").unwrap(),
        |dir| set_mtime(&dir.join("etc/hostname"), 5),
        |dir| std::os::unix::fs::chown(dir.join("etc/hostname"), Some(7), None).unwrap(),
        |dir| std::os::unix::fs::chown(dir.join("etc"), None, Some(7)).unwrap(),
        |dir| {
            std::fs::write(dir.join("etc/hostname"), "bax\n").unwrap();
            set_mtime(&dir.join("etc/hostname"), 1_000_000_000);
        },
        |dir| {
            std::fs::remove_file(dir.join("bin")).unwrap();
            std::os::unix::fs::symlink("usr/bim", dir.join("bin")).unwrap();
            set_mtime(&dir.join("bin"), 1_000_000_000);
        },
    ];
    for change in changes {
        let changed = tree();
        change(changed.path());
        ids.push(world.import_dir("changed", changed.path()).await.unwrap().id);
    }
    let config = ImageConfig { user: Some("x".to_owned()), ..ImageConfig::default() };
    ids.push(world.import(None, tarred(plain.path()), config).await.unwrap().id);
    let all = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), all);
    // What does not matter: the time of a directory, and whether equal files are one.
    let same = tree();
    set_mtime(&same.path().join("etc"), 77);
    let id = world.import_dir("same", same.path()).await.unwrap().id;
    assert_eq!(id, world.images.resolve("plain").await.unwrap());
}

#[tokio::test]
async fn devices_fifos_and_sockets_are_left_out() {
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    let (world, source) = (World::new().await, tree());
    let make = |name: &str, kind, device| {
        mknodat(CWD, source.path().join(name), kind, Mode::from_raw_mode(0o666), device).unwrap();
    };
    let before = world.import_dir("before", source.path()).await.unwrap();
    make("etc/char", FileType::CharacterDevice, makedev(1, 3));
    make("etc/block", FileType::BlockDevice, makedev(7, 0));
    make("etc/fifo", FileType::Fifo, 0);
    make("etc/socket", FileType::Socket, 0);
    assert!(source.path().join("etc/char").metadata().unwrap().file_type().is_char_device());
    let after = world.import_dir("after", source.path()).await.unwrap();
    assert_eq!(before.id, after.id);
    let out = world.extract(&after.id).await;
    assert_eq!(names(&out.path().join("etc")), ["hostname"]);
}

#[tokio::test]
async fn a_new_agent_gives_the_same_image_another_root_file() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let old = world.root_file(&image.id).await;
    let world = world.reopen(NEWER_AGENT).await;
    // Whoever runs from the old file keeps it.
    let held = std::fs::File::open(&old).unwrap();
    let new = world.root_file(&image.id).await;
    assert_ne!(old, new);
    assert!(!old.exists());
    assert!(held.metadata().unwrap().len() > 0);
    let out = world.extract(&image.id).await;
    assert_eq!(std::fs::read(out.path().join(".torpor/agent")).unwrap(), NEWER_AGENT);
    world.images.verify("sample").await.unwrap();
    // Importing the same tree again is still the same image, and the renewed file has everything.
    assert_eq!(world.import_dir("again", source.path()).await.unwrap().id, image.id);
    // Modes too, setuid among them: with another tree the renewal would have been refused.
    assert_eq!(links_of_sudo(&new), "2");
}

#[tokio::test]
async fn the_root_file_of_a_saved_machine_outlives_its_agent_while_it_is_needed() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let before = world.images.root(&image.id).await.unwrap();
    let mut sleeper = record(&image.id, None);
    sleeper.facts.root = Some(before.file.clone());
    world.record(&sleeper).await.unwrap();
    let world = world.reopen(NEWER_AGENT).await;
    assert_ne!(world.images.root(&image.id).await.unwrap().file, before.file);
    let world = world.reopen(NEWER_AGENT).await;
    let kept = world.images.root_file(&image.id, &before.file).await.unwrap();
    assert!(kept.path == before.path && kept.path.exists());
    let outside = world.images.root_file(&image.id, "../../VERSION").await;
    assert!(outside.is_err(), "{outside:?}");
    world.archive(&sleeper).await;
    let world = world.reopen(NEWER_AGENT).await;
    let error = world.images.root_file(&image.id, &before.file).await.unwrap_err().to_string();
    assert!(error.contains(&before.file) && error.contains("gone"), "{error}");
}

/// Names that /usr/bin/sudo has, by an opinion other than ours.
fn links_of_sudo(file: &Path) -> String {
    let output = std::process::Command::new("dump.erofs")
        .arg("--path=/usr/bin/sudo")
        .arg(file)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let after = text.split("Links:").nth(1).unwrap_or_else(|| panic!("{text}"));
    after.split_whitespace().next().unwrap().to_owned()
}

#[tokio::test]
async fn start_removes_what_a_crash_left() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let dir = world.dir.clone();
    // Before the rename; between the rename and the ledger; a second root file, the same way.
    std::fs::create_dir_all(dir.join("staging/0123/tree/etc")).unwrap();
    std::fs::create_dir_all(dir.join("images").join("0".repeat(64))).unwrap();
    std::fs::write(dir.join("images").join("0".repeat(64)).join("x.erofs"), "x").unwrap();
    std::fs::write(dir.join("images").join(image.id.as_str()).join("y.erofs"), "y").unwrap();
    let world = world.reopen(AGENT).await;
    assert_eq!(world.leftovers(), (vec![], vec![image.id.to_string()]));
    assert_eq!(names(&dir.join("images").join(image.id.as_str())).len(), 1);
    world.images.verify("sample").await.unwrap();
}

#[tokio::test]
async fn a_directory_left_between_rename_and_ledger_is_no_obstacle_to_the_same_import() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    world.images.remove("sample").await.unwrap();
    let dir = world.dir.join("images").join(image.id.as_str());
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("half.erofs"), "half").unwrap();
    world.import_dir("sample", source.path()).await.unwrap();
    world.images.verify("sample").await.unwrap();
    assert_eq!(names(&dir).len(), 1);
}

#[tokio::test]
async fn a_flipped_byte_is_noticed_and_healed_by_importing_again() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let path = world.root_file(&image.id).await;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let at = file.metadata().unwrap().size() - 4000;
    let mut byte = [0u8];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();

    let error = world.images.verify("sample").await.unwrap_err();
    let StoreError::CorruptImage { id, detail } = &error else { panic!("{error}") };
    assert_eq!(*id, image.id.to_string());
    assert!(detail.contains(path.to_str().unwrap()), "{detail}");

    let world = world.reopen(AGENT).await;
    let error = world.images.root(&image.id).await.unwrap_err();
    assert!(matches!(error, StoreError::CorruptImage { .. }), "{error}");
    world.import_dir("sample", source.path()).await.unwrap();
    world.images.root(&image.id).await.unwrap();
}

#[tokio::test]
async fn a_file_that_was_cut_off_or_overwritten_is_noticed_at_every_use() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let path = world.root_file(&image.id).await;
    let whole = std::fs::read(&path).unwrap();
    let mut foreign = whole.clone();
    foreign[1024..1028].fill(0);
    for damage in [&whole[..whole.len() - 1], &foreign, b"", b"short"] {
        world.images.root(&image.id).await.unwrap();
        std::fs::write(&path, damage).unwrap();
        let error = world.images.root(&image.id).await.unwrap_err();
        assert!(matches!(error, StoreError::CorruptImage { .. }), "{error}");
        std::fs::write(&path, &whole).unwrap();
    }
    std::fs::remove_file(&path).unwrap();
    let error = world.images.root(&image.id).await.unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
}

#[tokio::test]
async fn an_image_that_a_sandbox_needs_stays() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("sample", source.path()).await.unwrap();
    let sandbox = record(&image.id, Some("web"));
    world.record(&sandbox).await.unwrap();
    for reference in ["sample", image.id.as_str()] {
        let error = world.images.remove(reference).await.unwrap_err();
        assert!(matches!(&error, StoreError::InUse { by, .. } if by == "sandbox web"), "{error}");
    }
    world.images.root(&image.id).await.unwrap();
    world.archive(&sandbox).await;
    world.images.remove("sample").await.unwrap();
    assert_eq!(world.leftovers(), (vec![], vec![]));
    let error = world.images.root(&image.id).await.unwrap_err();
    assert!(matches!(error, StoreError::NoSuchImage(_)), "{error}");
    // A sandbox that comes too late is told so.
    let error = world.record(&sandbox).await.unwrap_err();
    assert!(matches!(error, StoreError::NoSuchImage(_)), "{error}");
}

#[tokio::test]
async fn removing_one_of_several_names_only_removes_the_name() {
    let (world, source) = (World::new().await, tree());
    let image = world.import_dir("one", source.path()).await.unwrap();
    world.images.tag("one", &"two:2".parse().unwrap()).await.unwrap();
    world.record(&record(&image.id, None)).await.unwrap();
    world.images.remove("one").await.unwrap();
    assert_eq!(world.images.inspect("two:2").await.unwrap().names, ["two:2"]);
    assert!(world.images.resolve("one").await.is_err());
}

#[tokio::test]
async fn an_image_is_found_by_name_by_id_and_by_the_beginning_of_its_id() {
    let (world, source) = (World::new().await, tree());
    let id = world.import_dir("team/sample:1", source.path()).await.unwrap().id;
    let text = id.as_str();
    for reference in ["team/sample:1", text, &text[..12], &text[..40]] {
        assert_eq!(world.images.resolve(reference).await.unwrap(), id, "{reference}");
    }
    let wrong = ["team/sample", &text[..11], "", "../x", "*", &text.to_uppercase(), "0123456789ab"];
    for reference in wrong {
        let error = world.images.resolve(reference).await.unwrap_err();
        assert!(matches!(error, StoreError::NoSuchImage(_)), "{reference}: {error}");
    }
}

#[tokio::test]
async fn a_name_moves_to_the_image_that_got_it_last() {
    let (world, one, two) = (World::new().await, tree(), tree());
    std::fs::write(two.path().join("extra"), "x").unwrap();
    let first = world.import_dir("app", one.path()).await.unwrap();
    let second = world.import_dir("app", two.path()).await.unwrap();
    assert_eq!(world.images.resolve("app").await.unwrap(), second.id);
    assert!(world.images.inspect(first.id.as_str()).await.unwrap().names.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_imports_of_the_same_tree_at_once_are_one_image() {
    let (world, source) = (World::new().await, tree());
    let mut tasks = tokio::task::JoinSet::new();
    for index in 0..8 {
        let (images, tar) = (world.images.clone(), std::io::Cursor::new(tarred(source.path())));
        let name: torpor_store::ImageName = format!("copy-{index}").parse().unwrap();
        tasks.spawn(async move {
            let config = ImageConfig::default();
            images.import_tar_stream(Some(&name), tar, config, u64::MAX, quiet()).await
        });
    }
    for image in tasks.join_all().await {
        image.unwrap();
    }
    let images = world.images.all().await.unwrap();
    assert_eq!((images.len(), images[0].names.len()), (1, 8));
    world.images.verify("copy-3").await.unwrap();
    assert_eq!(world.leftovers().0, Vec::<String>::new());
}
