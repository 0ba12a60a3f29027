//! Pushes and logins.

use bytes::Bytes;
use torpor_registry::{Descriptor, Digest, Error, ImageManifest, Login, MANIFEST_TYPE, Placed};

use crate::fake::{Fake, Known, Reply, client};

fn blob(bytes: &[u8], media_type: &str) -> Descriptor {
    let (digest, size) = (Digest::of(bytes), bytes.len() as u64);
    Descriptor { media_type: media_type.to_owned(), digest, size }
}

#[tokio::test]
async fn only_what_is_missing_is_sent() {
    let fake = Fake::start(|asked| match (asked.method.as_str(), asked.path.as_str()) {
        ("HEAD", path) if path.contains(Digest::of(b"there").as_str()) => Reply::ok(""),
        ("HEAD", _) => Reply::new(404, ""),
        ("POST", path) if path.contains("mount=") => Reply::new(201, ""),
        ("POST", _) => Reply::new(202, "").header("location", "/v2/a/b/blobs/uploads/1?state=x"),
        ("PUT", _) => Reply::new(201, ""),
        _ => Reply::new(400, ""),
    })
    .await;
    let (client, to) = (client(Known::default()), fake.reference("a/b:1"));
    let layer = "application/vnd.oci.image.layer.v1.tar+gzip";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("layer");
    std::fs::write(&file, b"missing").unwrap();
    let missing = blob(b"missing", layer);
    let there = blob(b"there", layer);
    let push = async |blob: &Descriptor, from| client.push_file(&to, blob, &file, from).await;
    assert_eq!(push(&there, None).await.unwrap(), Placed::There);
    assert_eq!(push(&missing, Some("other/repo")).await.unwrap(), Placed::Mounted);
    assert_eq!(push(&missing, None).await.unwrap(), Placed::Sent);
    let put = fake.asked.lock().last().unwrap().clone();
    let digest = missing.digest.as_str().replace(':', "%3A");
    assert_eq!(put.path, format!("/v2/a/b/blobs/uploads/1?state=x&digest={digest}"));
    assert_eq!(put.body, b"missing");

    let config = blob(b"{}", "application/vnd.oci.image.config.v1+json");
    let manifest = ImageManifest::new(config, vec![missing]);
    let bytes = Bytes::from(serde_json::to_vec(&manifest).unwrap());
    let digest = client.push_manifest(&to, &manifest, bytes.clone()).await.unwrap();
    assert_eq!(digest, Digest::of(&bytes));
    let put = fake.asked.lock().last().unwrap().clone();
    assert_eq!(put.path, "/v2/a/b/manifests/1");
    assert_eq!(put.headers["content-type"], MANIFEST_TYPE);
    let other = to.pinned(Digest::of(b"other"));
    assert!(client.push_manifest(&other, &manifest, bytes).await.is_err());
}

#[tokio::test]
async fn a_login_is_tried() {
    let fake = Fake::start(|asked| match asked.authorization() {
        Some("Basic dTpw") => Reply::ok("{}"),
        _ => Reply::new(401, "{}").header("www-authenticate", "Basic realm=x"),
    })
    .await;
    let client = client(Known::default());
    let login =
        |password: &str| Login::Password { username: "u".into(), password: password.into() };
    client.check_login(&fake.host, &login("p")).await.unwrap();
    let error = client.check_login(&fake.host, &login("wrong")).await.unwrap_err();
    assert!(matches!(error, Error::Denied { anonymous: false, .. }), "{error}");
}
