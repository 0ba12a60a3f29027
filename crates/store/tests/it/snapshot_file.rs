//! A snapshot as one file: it goes from one installation to another, and damage never becomes a save.

use std::io::{Cursor, Read};
use std::sync::Arc;

use parking_lot::Mutex;
use torpor_lifecycle::engine::Changes;
use torpor_lifecycle::store::{LocalSave, Saves as _, StoreError};
use torpor_protocol::ImageId;
use torpor_store::LayerChanges;

use crate::files::Made;
use crate::saves::{commit, keep, pictured, snapshot};
use crate::world::{Tar, World, names};

/// A writer whose bytes can be had afterwards.
#[derive(Clone, Default)]
struct Shelf(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Shelf {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub(crate) async fn export(
    world: &World,
    image: &ImageId,
    save: &Arc<LocalSave>,
    with_image: bool,
) -> Vec<u8> {
    let shelf = Shelf::default();
    let record = snapshot(image, save);
    world.saves.export(save.clone(), &record.snapshot, with_image, shelf.clone()).await.unwrap();
    std::mem::take(&mut shelf.0.lock())
}

pub(crate) async fn refused(world: &World, bytes: Vec<u8>) -> String {
    let error = world.saves.import(&world.images, Cursor::new(bytes)).await.unwrap_err();
    let StoreError::Invalid(text) = error else { panic!("{error:?}") };
    text
}

pub(crate) fn nothing_in(world: &World) {
    assert_eq!(world.leftovers(), (vec![], vec![]));
    assert_eq!(names(&world.dir.join("saves")), Vec::<String>::new());
}

/// The parts of a snapshot file: name and content.
pub(crate) fn parts(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(bytes);
    let part = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        (entry.path().unwrap().display().to_string(), content)
    };
    archive.entries().unwrap().map(part).collect()
}

pub(crate) fn packed(parts: &[(String, Vec<u8>)]) -> Vec<u8> {
    let files = parts.iter().fold(Tar::default(), |tar, (name, content)| tar.file(name, content));
    files.end()
}

#[tokio::test]
async fn a_memory_snapshot_goes_to_another_installation_with_its_image() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let bytes = export(&here, &image, &save, true).await;
    let there = World::new().await;
    let imported = there.saves.import(&there.images, Cursor::new(bytes)).await.unwrap();
    assert_ne!(imported.save.id, save.id);
    assert_eq!(imported.save.manifest.files, save.manifest.files);
    assert_eq!(imported.save.manifest.about.processes, save.manifest.about.processes);
    assert_eq!(imported.snapshot.image_id, image);
    keep(&there, &image, &imported.save).await;
    there.saves.verify(&imported.save.id).await.unwrap();
    there.images.verify(image.as_str()).await.unwrap();
    let error = there.images.remove(image.as_str()).await.unwrap_err();
    assert!(matches!(&error, StoreError::InUse { by, .. } if by == "snapshot base"), "{error:?}");
    assert_eq!(there.leftovers(), (vec![], vec![image.to_string()]));
}

#[tokio::test]
async fn a_snapshot_of_somebody_else_has_no_claim_to_our_secrets() {
    let (here, image) = pictured().await;
    let staged = here.saves.stage().await.unwrap();
    std::fs::write(staged.path().join("memory"), "content").unwrap();
    let mut about = super::saves::about(&image);
    about.spec.secrets = vec!["TOKEN".parse().unwrap()];
    about.spec.network = serde_json::from_value(serde_json::json!({
        "internet": true, "deny": ["evil.test"], "secrets": ["TOKEN"], "gateway": "office",
        "routes": [{"hosts": ["theirs.test"], "headers": {"x-key": "{{SECRET:TOKEN}}"}}],
    }))
    .unwrap();
    let save = here.saves.commit(staged, about).await.unwrap();
    let bytes = export(&here, &image, &save, true).await;
    let there = World::new().await;
    let imported = there.saves.import(&there.images, Cursor::new(bytes)).await.unwrap();
    let spec = &imported.save.manifest.about.spec;
    assert!(spec.secrets.is_empty() && !spec.network.is_intercepted(), "{spec:?}");
    assert_eq!(spec.network.gateway, None);
    assert_eq!(spec.network.deny, ["evil.test".parse().unwrap()], "what it may not reach stays");
}

#[tokio::test]
async fn a_filesystem_snapshot_goes_where_its_image_is() {
    let (here, image) = pictured().await;
    let memory = commit(&here, &image).await;
    let made = Made::default().file("etc/new", "content").removed("etc/hostname");
    let save = here.saves.files_of(&memory, made.boxed()).await.unwrap();
    // With or without it in the file.
    for with_image in [false, true] {
        let bytes = export(&here, &image, &save, with_image).await;
        let imported = here.saves.import(&here.images, Cursor::new(bytes)).await.unwrap();
        let layer = LayerChanges::open(&imported.save.dir).unwrap();
        assert_eq!(layer.entries().len(), 2);
    }
    assert_eq!(here.images.all().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_snapshot_file_is_a_tar_with_everything_in_it() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let found = parts(&export(&here, &image, &save, true).await);
    let listed: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    let expected =
        ["torpor-snapshot.json", "checkpoint.img", "empty.img", "pages.img", "image.erofs"];
    assert_eq!(listed, expected);
    let header: serde_json::Value = serde_json::from_slice(&found[0].1).unwrap();
    assert_eq!(header["format"], 1);
    assert_eq!(header["snapshot"]["name"], "base");
    assert_eq!(header["manifest"]["engine_version"], "release-1");
}

#[tokio::test]
async fn a_snapshot_without_its_image_is_refused_where_the_image_is_not() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let bytes = export(&here, &image, &save, false).await;
    let there = World::new().await;
    let text = refused(&there, bytes).await;
    assert!(text.contains("is neither here nor in the file"), "{text}");
    assert!(text.contains(image.as_str()), "{text}");
    nothing_in(&there);
}

#[tokio::test]
async fn every_cut_is_noticed_and_leaves_nothing() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let bytes = export(&here, &image, &save, true).await;
    let there = World::new().await;
    let whole = bytes.len() - 1024;
    let step = whole / 23;
    let boundaries = (0..whole).step_by(step).chain([1, 511, 512, 513, whole - 1]);
    for cut in boundaries {
        let text = refused(&there, bytes[..cut].to_vec()).await;
        assert!(!text.is_empty());
        nothing_in(&there);
    }
}

#[tokio::test]
async fn every_damaged_part_is_noticed_and_named() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let whole = parts(&export(&here, &image, &save, true).await);
    let there = World::new().await;
    for (index, (name, content)) in whole.iter().enumerate().skip(1) {
        let mut damaged = whole.clone();
        if content.is_empty() {
            damaged[index].1.push(1);
        } else {
            damaged[index].1[content.len() / 2] ^= 1;
        }
        let text = refused(&there, packed(&damaged)).await;
        assert!(text.contains(name.as_str()), "{name}: {text}");
        let mut missing = whole.clone();
        missing.remove(index);
        let text = refused(&there, packed(&missing)).await;
        assert!(text.contains(name.as_str()), "{name}: {text}");
        nothing_in(&there);
    }
    let mut more = whole.clone();
    more.push(("../../etc/cron.d/evil".to_owned(), b"x".to_vec()));
    let text = refused(&there, packed(&more)).await;
    assert!(text.contains("evil"), "{text}");
    nothing_in(&there);
}

#[tokio::test]
async fn hostile_letters_are_refused() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let whole = parts(&export(&here, &image, &save, true).await);
    let there = World::new().await;
    let header = String::from_utf8(whole[0].1.clone()).unwrap();
    let cases = [
        ("\"format\": 1", "\"format\": 2", "has format 2"),
        ("\"format\":1", "\"format\":3", "has format 3"),
        ("\"name\":\"pages.img\"", "\"name\":\"../pages.img\"", "../pages.img"),
        ("\"name\":\"pages.img\"", "\"name\":\"/etc/passwd\"", "/etc/passwd"),
        ("\"name\":\"pages.img\"", "\"name\":\"manifest.json\"", "manifest.json"),
        ("\"name\":\"pages.img\"", "\"name\":\"image.erofs\"", "image.erofs"),
        ("\"name\":\"pages.img\"", "\"name\":\"empty.img\"", "empty.img"),
        ("\"bytes\":9000001", "\"bytes\":18446744073709551615", "18446744073709551615"),
        ("\"bytes\":9000001", "\"bytes\":9000000", "should have 9000000"),
        ("\"kind\":\"memory\"", "\"kind\":\"filesystem\"", "another snapshot"),
        ("\"agent_hash\": \"", "\"agent_hash\": \"0", "another version of torpor"),
    ];
    for (from, to, says) in cases {
        let changed = header.replace(from, to);
        assert_ne!(changed, header, "{from}");
        let mut parts = whole.clone();
        parts[0].1 = changed.into_bytes();
        let text = refused(&there, packed(&parts)).await;
        assert!(text.contains(says), "{from}: {text}");
        nothing_in(&there);
    }
}

#[tokio::test]
async fn an_image_that_is_not_what_it_is_said_to_be_is_refused() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let mut parts = parts(&export(&here, &image, &save, true).await);
    let header = String::from_utf8(parts[0].1.clone()).unwrap();
    parts[0].1 = header.replace(image.as_str(), &"0".repeat(64)).into_bytes();
    let there = World::new().await;
    let text = refused(&there, packed(&parts)).await;
    assert!(text.contains("is said to be 0000"), "{text}");
    nothing_in(&there);
}

#[tokio::test]
async fn a_root_file_made_to_do_harm_is_refused() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    let whole = parts(&export(&here, &image, &save, true).await);
    let there = World::new().await;
    let root = &whole[4].1;
    let honest = blake3::hash(root).to_hex().to_string();
    // Superblock, inodes and directories come first.
    for at in (1024..root.len().min(9000)).step_by(61) {
        let mut parts = whole.clone();
        parts[4].1[at] = parts[4].1[at].wrapping_add(0x7f);
        let hash = blake3::hash(&parts[4].1).to_hex().to_string();
        let header = String::from_utf8(whole[0].1.clone()).unwrap();
        parts[0].1 = header.replace(&honest, &hash).into_bytes();
        match there.saves.import(&there.images, Cursor::new(packed(&parts))).await {
            // Bytes that nobody reads.
            Ok(_) => there.images.verify(image.as_str()).await.unwrap(),
            Err(error) => assert!(matches!(error, StoreError::Invalid(_)), "{at}: {error:?}"),
        }
    }
}

#[tokio::test]
async fn what_is_no_snapshot_file_is_called_that() {
    let there = World::new().await;
    let others = [
        Vec::new(),
        b"hello".to_vec(),
        vec![0; 4096],
        Tar::default().file("manifest.json", b"{}").end(),
        Tar::default().file("torpor-snapshot.json", b"{}").end(),
        Tar::default().symlink("torpor-snapshot.json", "/etc/passwd").end(),
    ];
    for bytes in others {
        let text = refused(&there, bytes).await;
        assert_eq!(text, "this is no snapshot file of torpor");
        nothing_in(&there);
    }
}

#[tokio::test]
async fn a_corrupt_save_is_not_exported() {
    let (here, image) = pictured().await;
    let save = commit(&here, &image).await;
    std::fs::write(save.dir.join("checkpoint.img"), "STATE").unwrap();
    let record = snapshot(&image, &save);
    let exported = here.saves.export(save, &record.snapshot, false, std::io::sink()).await;
    let error = exported.unwrap_err();
    assert!(
        matches!(&error, StoreError::CorruptSave { file, .. } if file == "checkpoint.img"),
        "{error:?}"
    );
    assert!(here.snapshots().await.is_empty());
}
