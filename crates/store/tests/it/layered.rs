//! Images in layers: `docker save` archives and OCI layouts.

use sha2::{Digest, Sha256};
use torpor_lifecycle::store::StoreError;
use torpor_store::Image;

use crate::world::{Tar, World, gzip, names, quiet};

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn config(layers: &[Vec<u8>]) -> Vec<u8> {
    let diffs: Vec<_> = layers.iter().map(|tar| format!("\"sha256:{}\"", sha256(tar))).collect();
    format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{"Env":["A=1"],"WorkingDir":"/app",
        "User":"app","Entrypoint":["/e"],"Cmd":["c"]}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        diffs.join(",")
    )
    .into_bytes()
}

/// What `docker save` writes; its manifest comes last.
fn docker(layers: &[Vec<u8>]) -> Tar {
    let mut tar = Tar::default();
    let mut listed = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let name = format!("{index}/layer.tar");
        tar = tar.file(&name, layer);
        listed.push(format!("\"{name}\""));
    }
    let manifest = format!(
        r#"[{{"Config":"config.json","RepoTags":["x:y"],"Layers":[{}]}}]"#,
        listed.join(",")
    );
    tar.file("config.json", &config(layers)).file("manifest.json", manifest.as_bytes())
}

/// Names and content of an OCI layout; layers are compressed.
fn oci(layers: &[Vec<u8>]) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec())];
    let mut blob = |bytes: Vec<u8>| {
        let digest = sha256(&bytes);
        files.push((format!("blobs/sha256/{digest}"), bytes));
        digest
    };
    let config = blob(config(layers));
    let listed: Vec<_> = layers
        .iter()
        .map(|tar| format!(r#"{{"mediaType":"x","digest":"sha256:{}"}}"#, blob(gzip(tar))))
        .collect();
    let manifest = blob(
        format!(
            r#"{{"schemaVersion":2,"config":{{"digest":"sha256:{config}"}},"layers":[{}]}}"#,
            listed.join(",")
        )
        .into_bytes(),
    );
    let index = format!(
        r#"{{"schemaVersion":2,"manifests":[
        {{"digest":"sha256:{manifest}","platform":{{"os":"linux","architecture":"amd64"}}}},
        {{"digest":"sha256:{}","platform":{{"os":"unknown","architecture":"unknown"}}}}]}}"#,
        "0".repeat(64)
    );
    files.push(("index.json".to_owned(), index.into_bytes()));
    files
}

fn pack(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Tar::default();
    for (name, bytes) in files {
        tar = tar.file(name, bytes);
    }
    tar.end()
}

fn layers() -> Vec<Vec<u8>> {
    let one = Tar::default()
        .dir("etc")
        .file("etc/keep", b"1")
        .file("etc/gone", b"1")
        .dir("cache")
        .file("cache/old", b"1")
        .dir("cache/sub")
        .file("cache/sub/old", b"1")
        .dir("lib")
        .file("lib/file", b"1")
        .symlink("link", "lib")
        .end();
    let two = Tar::default()
        .file("etc/.wh.gone", b"")
        .file("etc/new", b"2")
        .file("cache/new", b"2")
        // After what it must spare.
        .file("cache/.wh..wh..opq", b"")
        .file("link/through", b"2")
        .file(".wh.absent", b"")
        .file(".wh..wh.plnk", b"")
        .end();
    vec![one, two]
}

async fn check(world: &World, image: &Image) {
    assert_eq!(image.config.env, [("A".to_owned(), "1".to_owned())]);
    assert_eq!(image.config.workdir.as_deref(), Some("/app"));
    assert_eq!(image.config.entrypoint, ["/e"]);
    let out = world.extract(&image.id).await;
    let out = out.path();
    assert_eq!(names(&out.join("etc")), ["keep", "new"]);
    assert_eq!(names(&out.join("cache")), ["new"]);
    assert_eq!(names(&out.join("lib")), ["file", "through"]);
    assert!(!names(out).iter().any(|name| name.contains(".wh.")));
}

async fn refused(bytes: Vec<u8>, why: &str) {
    let world = World::new().await;
    let error = world.import_any(bytes).await.expect_err(why);
    assert!(matches!(error, StoreError::Invalid(_)), "{error:?}");
    assert!(error.to_string().contains(why), "{why:?} is not in {error}");
    assert_eq!(world.leftovers(), (vec![], vec![]));
}

#[tokio::test]
async fn docker_archives_and_oci_layouts_of_the_same_layers_are_the_same_image() {
    let world = World::new().await;
    let docker = docker(&layers()).end();
    let image = world.import_any(docker.clone()).await.unwrap();
    check(&world, &image).await;
    assert_eq!(world.import_any(gzip(&docker)).await.unwrap().id, image.id);

    let oci = oci(&layers());
    assert_eq!(world.import_any(pack(&oci)).await.unwrap().id, image.id);
}

#[tokio::test]
async fn equal_layers_that_are_links_in_the_archive_are_found() {
    let world = World::new().await;
    let layer = layers().remove(0);
    let manifest =
        br#"[{"Config":"c.json","RepoTags":null,"Layers":["a/layer.tar","b/layer.tar"]}]"#;
    let tar = Tar::default()
        .file("a/layer.tar", &layer)
        .symlink("b/layer.tar", "../a/layer.tar")
        .file("c.json", b"{}")
        .file("manifest.json", manifest)
        .end();
    let image = world.import_any(tar).await.unwrap();
    let out = world.extract(&image.id).await;
    assert!(out.path().join("etc/gone").exists());
}

#[tokio::test]
async fn whiteouts_spare_what_their_own_layer_brought() {
    let world = World::new().await;
    let one = Tar::default().dir("d").file("d/old", b"1").file("f", b"1").end();
    let two = Tar::default()
        .file("d/new", b"2")
        .file(".wh.d", b"")
        .file("f", b"2")
        .file(".wh.f", b"")
        .symlink("l", "d")
        .file(".wh.l", b"")
        .end();
    let image = world.import_any(docker(&[one, two]).end()).await.unwrap();
    let out = world.extract(&image.id).await;
    assert_eq!(names(&out.path().join("d")), ["new"]);
    assert_eq!(std::fs::read(out.path().join("f")).unwrap(), b"2");
}

#[tokio::test]
async fn hostile_whiteouts_are_refused() {
    for name in [".wh...", ".wh.", "etc/.wh..", "etc/.wh..."] {
        refused(docker(&[Tar::default().file(name, b"").end()]).end(), "can't exist").await;
    }
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("precious"), "x").unwrap();
    let target = outside.path().to_str().unwrap();
    let one = Tar::default().symlink("out", target).end();
    let two = Tar::default().file("out/.wh.precious", b"").file("out/.wh..wh..opq", b"").end();
    World::new().await.import_any(docker(&[one, two]).end()).await.unwrap();
    assert!(outside.path().join("precious").exists());
}

#[tokio::test]
async fn damaged_blobs_are_refused() {
    for kind in 1..=4 {
        let mut files = oci(&layers());
        let last = files[kind].1.len() - 1;
        files[kind].1[last] ^= 1;
        refused(pack(&files), "").await;
    }
    let mut files = oci(&layers());
    // Still a good gzip file, but another.
    files[2].1 = gzip(&layers()[1]);
    refused(pack(&files), "is damaged").await;
    let mut swapped = layers();
    let manifest = docker(&swapped);
    swapped.reverse();
    let mixed = Tar::default().file("0/layer.tar", &swapped[0]).file("1/layer.tar", &swapped[1]);
    let mixed = mixed.file("config.json", &config(&layers()));
    let listed = br#"[{"Config":"config.json","Layers":["0/layer.tar","1/layer.tar"]}]"#;
    refused(mixed.file("manifest.json", listed).end(), "is damaged").await;
    drop(manifest);
}

#[tokio::test]
async fn image_archives_that_make_no_sense_are_refused() {
    let manifest = |text: &str| Tar::default().file("manifest.json", text.as_bytes()).end();
    refused(manifest(r#"[{"Config":"../../etc/passwd","Layers":[]}]"#), "has no").await;
    refused(manifest(r#"[{"Config":"/etc/passwd","Layers":[]}]"#), "has no").await;
    refused(manifest("[]"), "exactly one image").await;
    let tar = Tar::default().file("c", br#"{"architecture":"mips","os":"plan9"}"#);
    let tar = tar.file("manifest.json", br#"[{"Config":"c","Layers":[]}]"#).end();
    refused(tar, "is for plan9/mips").await;
    let index = |text: &str| {
        Tar::default().file("oci-layout", b"{}").file("index.json", text.as_bytes()).end()
    };
    refused(index("{}"), "no image for linux/").await;
    refused(index(r#"{"manifests":[{"digest":"sha256:../x"}]}"#), "no SHA-256 digest").await;
    refused(index(r#"{"manifests":[{"digest":"md5:00"}]}"#), "no SHA-256 digest").await;
    refused(index("nonsense"), "index.json").await;
    let zstd = [&[0x28, 0xb5, 0x2f, 0xfd][..], b"rest"].concat();
    refused(docker(&[zstd]).end(), "can't be read").await;
}

#[tokio::test]
async fn the_layer_of_a_save_on_its_image_is_another_image() {
    let world = World::new().await;
    let base = Tar::default().dir("etc").file("etc/keep", b"1").file("etc/gone", b"2");
    let base = world.import_tar(base.file("etc/hosts", b"old").end()).await.unwrap();
    let layer = Tar::default().file("etc/new", b"3").file("etc/.wh.gone", b"");
    let layer = layer.pax("TORPOR.literal", "1").file("etc/.wh.keep", b"a file");
    let layer = std::io::Cursor::new(layer.file("etc/hosts", b"new").end());
    let name = "made".parse().unwrap();
    let without = &["/etc/hosts", "/etc/nothing", "/nowhere/x"];
    let (from, room) = (base.id.clone(), 1 << 20);
    let layered = torpor_store::images::Layered { base: from, room, without, built: None };
    let made = world.images.import_layer(Some(&name), layered, layer, quiet());
    let made = made.await.unwrap();
    assert_eq!(
        (made.names.as_slice(), &made.config),
        (&["made:latest".to_owned()][..], &base.config)
    );
    let tree = world.extract(&made.id).await;
    assert_eq!(names(&tree.path().join("etc")), [".wh.keep", "keep", "new"]);
    assert_eq!(std::fs::read(tree.path().join("etc/.wh.keep")).unwrap(), b"a file");
    let before = world.extract(&base.id).await;
    assert_eq!(names(&before.path().join("etc")), ["gone", "hosts", "keep"]);
    assert_eq!(world.leftovers().0, [""; 0]);
}
