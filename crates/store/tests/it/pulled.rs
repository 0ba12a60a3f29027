//! Images of registries: the cache of layers, sizes, export, and what is pruned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};
use torpor_lifecycle::store::StoreError;
use torpor_store::{Image, ImageConfig, Pulled, PulledLayer};

use crate::world::{Tar, World, gzip, names, quiet, record};

fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    // Two frames, and one that is to be skipped.
    let (one, other) = bytes.split_at(bytes.len() / 2);
    let frame = |bytes: &[u8]| compress_to_vec(bytes, CompressionLevel::Fastest);
    [&frame(one)[..], &[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3], &frame(other)].concat()
}

/// Puts layers (plain, and as they are stored) into the cache, as a pull does, and makes an image.
async fn pull(
    world: &World,
    name: &str,
    layers: &[(Vec<u8>, Vec<u8>)],
) -> Result<Image, StoreError> {
    let (mut pulled, mut pins) = (Vec::new(), Vec::new());
    for (_, stored) in layers {
        let digest = sha256(stored);
        let pin = world.images.layers().pin(&digest).unwrap();
        if !pin.is_there(stored.len() as u64) {
            std::fs::write(pin.part(), stored).unwrap();
            pin.keep().await.unwrap();
        }
        pulled.push(PulledLayer { digest, bytes: stored.len() as u64, path: pin.path() });
        pins.push(pin);
    }
    let diffs: Vec<_> = layers.iter().map(|(plain, _)| format!("{:?}", sha256(plain))).collect();
    let config = format!(
        r#"{{"os":"linux","config":{{"Env":["A=1"],"ExposedPorts":{{"80/tcp":{{}}}}}},"rootfs":{{"diff_ids":[{}]}}}}"#,
        diffs.join(",")
    );
    let pulled = Pulled {
        reference: format!("host.x/{name}@{}", sha256(config.as_bytes())),
        manifest: b"{}".to_vec(),
        config: config.into_bytes(),
        layers: pulled,
    };
    let name = format!("host.x/{name}").parse().unwrap();
    world.images.import_pulled(&name, pulled, quiet()).await
}

fn base() -> (Vec<u8>, Vec<u8>) {
    let tar = Tar::default().dir("etc").file("etc/keep", b"1").file("etc/gone", b"2");
    let tar = tar.file("a", &[7; 5000]).hardlink("b", "a").symlink("l", "etc/keep").end();
    (tar.clone(), gzip(&tar))
}

fn top(text: &str) -> (Vec<u8>, Vec<u8>) {
    let tar = Tar::default().file("etc/.wh.gone", b"").file("etc/new", text.as_bytes());
    let tar = tar.entry(b'3', "device", "", b"").end();
    (tar.clone(), zstd(&tar))
}

#[tokio::test]
async fn layers_are_applied_in_their_order_and_shared() {
    let world = World::new().await;
    let one = pull(&world, "one:V1", &[base(), top("one")]).await.unwrap();
    let shared = base().1.len() as u64;
    assert_eq!(one.layers.shared_bytes, 0);
    assert_eq!(one.layers.own_bytes, shared + top("one").1.len() as u64);
    assert_eq!(one.names, ["host.x/one:V1"]);
    assert_eq!(one.config.exposed, ["80/tcp"]);
    let tree = world.extract(&one.id).await;
    assert_eq!(names(&tree.path().join("etc")), ["keep", "new"]);
    assert_eq!(std::fs::read(tree.path().join("b")).unwrap(), [7; 5000]);
    assert!(!tree.path().join("device").exists());

    let two = pull(&world, "two", &[base(), top("two")]).await.unwrap();
    assert_eq!((two.layers.shared_bytes, two.layers.digests.len()), (shared, 1));
    assert_eq!(world.images.inspect("host.x/one:V1").await.unwrap().layers.shared_bytes, shared);
    assert_eq!(names(&world.dir.join("layers")).len(), 3, "the lower layer is there once");
    let by_digest = world.images.resolve(&two.layers.digests[0]).await.unwrap();
    assert_eq!(by_digest, two.id);
}

#[tokio::test]
async fn a_layer_that_was_damaged_is_told_and_fetched_anew() {
    let world = World::new().await;
    let (plain, stored) = base();
    pull(&world, "one", &[(plain.clone(), stored.clone())]).await.unwrap();
    let path = world.dir.join("layers").join(sha256(&stored).trim_start_matches("sha256:"));
    let mut bytes = stored.clone();
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let other = pull(&world, "other", &[(plain.clone(), stored.clone()), top("x")]).await;
    assert!(matches!(other, Err(StoreError::Invalid(_))), "{other:?}");
    assert!(!path.exists());
    pull(&world, "other", &[(plain, stored), top("x")]).await.unwrap();
    let wrong = pull(&world, "wrong", &[(b"other".to_vec(), base().1)]).await.unwrap_err();
    assert!(wrong.to_string().contains("damaged"), "{wrong}");
}

#[tokio::test]
async fn an_exported_image_is_the_same_bytes_each_time_and_comes_back_as_itself() {
    let world = World::new().await;
    let image = pull(&world, "one", &[base(), top("one")]).await.unwrap();
    let exported = world.images.export(&image).await.unwrap();
    let again = world.images.export(&image).await.unwrap();
    assert_eq!((&exported.digest, &exported.config), (&again.digest, &again.config));
    let stored = std::fs::read(&exported.layer).unwrap();
    assert_eq!((sha256(&stored), stored.len() as u64), (exported.digest.clone(), exported.bytes));
    let mut plain = Vec::new();
    let mut decoder = flate2::read::GzDecoder::new(&stored[..]);
    std::io::Read::read_to_end(&mut decoder, &mut plain).unwrap();
    let back = pull(&world, "back", &[(plain, stored)]).await.unwrap();
    assert_eq!(back.id, image.id);
}

#[tokio::test]
async fn only_what_nobody_names_or_needs_is_pruned() {
    let world = World::new().await;
    let named = pull(&world, "named", &[base(), top("named")]).await.unwrap();
    let nameless = Tar::default().file("x", b"1").end();
    let nameless = world.import_tar(nameless).await.unwrap();
    let used = world.import_tar(Tar::default().file("y", b"1").end()).await.unwrap();
    world.record(&record(&used.id, Some("web"))).await.unwrap();
    std::fs::write(world.dir.join("layers").join(format!("{}.part", "0".repeat(64))), b"12345")
        .unwrap();

    let would = world.images.prune(false, true).await.unwrap();
    assert_eq!(would.images, std::slice::from_ref(&nameless));
    assert_eq!((would.layers, would.freed_bytes), (1, nameless.size_bytes + 5));
    assert!(world.images.inspect(nameless.id.as_str()).await.is_ok(), "it was only said");
    let pinned = world.images.layers().pin(&format!("sha256:{}", "0".repeat(64))).unwrap();
    let done = world.images.prune(false, false).await.unwrap();
    assert_eq!((done.images.len(), done.layers), (1, 0), "what is being fetched stays");
    drop(pinned);
    assert_eq!(world.images.prune(false, false).await.unwrap().layers, 1);
    assert!(world.images.inspect("host.x/named").await.is_ok());

    let done = world.images.prune(true, false).await.unwrap();
    assert_eq!(done.images.iter().map(|image| &image.id).collect::<Vec<_>>(), [&named.id]);
    assert_eq!(done.layers, 2);
    assert!(world.images.inspect(used.id.as_str()).await.is_ok());
    assert_eq!(world.leftovers().1, [used.id.to_string()]);
    assert!(names(&world.dir.join("layers")).is_empty());
}

#[tokio::test]
async fn an_image_is_pruned_or_used_and_never_both() {
    let world = Arc::new(World::new().await);
    for round in 0..20 {
        let tar = Tar::default().file("x", &[round; 10]).end();
        let image = world.import(None, tar, ImageConfig::default()).await.unwrap();
        let (id, pruning) = (image.id.clone(), Arc::clone(&world));
        let prune = tokio::spawn(async move { pruning.images.prune(true, false).await.unwrap() });
        let recorded = world.record(&record(&id, None)).await;
        let pruned = prune.await.unwrap().images.iter().any(|image| image.id == id);
        let there = world.images.inspect(id.as_str()).await.is_ok();
        assert_eq!((recorded.is_ok(), there), (!pruned, !pruned), "round {round}: {recorded:?}");
    }
}

#[tokio::test]
async fn an_image_is_found_by_its_digest_however_that_is_written() {
    let world = World::new().await;
    let image = pull(&world, "one", &[base()]).await.unwrap();
    let digest = sha256(&world.images.origin(&image).await.unwrap().unwrap().0.config);
    for name in ["host.x/one", "host.x/one:other", "docker.io/host.x/one"] {
        let text = format!("{name}@{digest}");
        assert_eq!(world.images.resolve(&text).await.unwrap(), image.id, "{text}");
    }
}

#[tokio::test]
async fn an_image_that_can_not_be_recorded_with_its_digest_gets_no_name() {
    let world = World::new().await;
    let ledger = format!("sqlite://{}", world.dir.join("ledger.db").display());
    let mut ledger = <sqlx::SqliteConnection as sqlx::Connection>::connect(&ledger).await.unwrap();
    let trigger = "CREATE TRIGGER broken BEFORE INSERT ON image_digests \
                   BEGIN SELECT RAISE(ABORT, 'broken'); END";
    sqlx::query(trigger).execute(&mut ledger).await.unwrap();
    pull(&world, "one", &[base()]).await.unwrap_err();
    assert!(world.images.all().await.unwrap().is_empty());
    let same = world.import_tar(base().0).await;
    assert!(same.is_ok(), "{same:?}");
    sqlx::query("DROP TRIGGER broken").execute(&mut ledger).await.unwrap();
    let image = pull(&world, "one", &[base()]).await.unwrap();
    assert_eq!((image.names.len(), image.layers.digests.len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn layers_of_a_pull_that_ends_while_others_are_pruned_stay() {
    let world = Arc::new(World::new().await);
    for round in 0..30 {
        let done = Arc::new(AtomicBool::new(false));
        let prunes: Vec<_> = (0..2)
            .map(|_| {
                let (pruning, done) = (Arc::clone(&world), Arc::clone(&done));
                tokio::spawn(async move {
                    while !done.load(Ordering::SeqCst) {
                        pruning.images.prune(false, false).await.unwrap();
                    }
                })
            })
            .collect();
        let image = pull(&world, &format!("n{round}"), &[top(&format!("{round}"))]).await.unwrap();
        done.store(true, Ordering::SeqCst);
        for prune in prunes {
            prune.await.unwrap();
        }
        assert!(world.images.origin(&image).await.unwrap().is_some(), "round {round}");
    }
}

#[tokio::test]
async fn what_is_worked_with_is_not_pruned() {
    let world = World::new().await;
    let image = pull(&world, "one", &[base(), top("one")]).await.unwrap();
    let held = world.images.hold(image.clone()).await.unwrap();
    let again = world.images.hold(image.clone()).await.unwrap();
    drop(held);
    assert!(world.images.prune(true, true).await.unwrap().images.is_empty());
    assert!(world.images.prune(true, false).await.unwrap().images.is_empty());
    let (pulled, layers) = world.images.origin(&again).await.unwrap().unwrap();
    drop(again);
    let done = world.images.prune(true, false).await.unwrap();
    assert_eq!((done.images.len(), done.layers), (1, 0));
    assert!(pulled.layers.iter().all(|layer| layer.path.is_file()));
    drop(layers);
    assert_eq!(world.images.prune(true, false).await.unwrap().layers, 2);
    assert!(matches!(world.images.hold(image).await, Err(StoreError::NoSuchImage(_))));
}

#[tokio::test]
async fn what_is_not_here_of_an_image_is_known_before_it_is_fetched() {
    let world = World::new().await;
    let (here, begun, none) = (base().1, "1".repeat(64), "2".repeat(64));
    pull(&world, "one", &[base()]).await.unwrap();
    let (begun, none) = (format!("sha256:{begun}"), format!("sha256:{none}"));
    let layers = world.images.layers();
    std::fs::write(layers.pin(&begun).unwrap().part(), [0; 30]).unwrap();
    let listed = [(&*sha256(&here), here.len() as u64), (&*begun, 100), (&*none, 7), (&*none, 7)];
    let (lacking, free) = layers.lacking(&listed).unwrap();
    assert_eq!(lacking, 70 + 7);
    assert!(free > 0);
}

#[tokio::test]
async fn what_failed_pulls_left_goes_after_a_while_also_while_the_daemon_runs() {
    let world = World::new().await;
    let image = pull(&world, "one", &[base()]).await.unwrap();
    let [old, young] = ["1", "2"].map(|digit| {
        let pin = world.images.layers().pin(&format!("sha256:{}", digit.repeat(64))).unwrap();
        std::fs::write(pin.part(), b"part").unwrap();
        pin.part()
    });
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(8 * 24 * 3600);
    let set = |path: &std::path::Path| {
        std::fs::File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    };
    set(&old);
    let kept = world.images.origin(&image).await.unwrap().unwrap().0.layers[0].path.clone();
    set(&kept);
    world.images.sweep_layers().await.unwrap();
    assert_eq!((old.exists(), young.exists(), kept.exists()), (false, true, true));
}
