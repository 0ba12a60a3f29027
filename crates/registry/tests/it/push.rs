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
    let push =
        async |blob: &Descriptor, from| client.push_file(&to, blob, &file, from, &|_| {}).await;
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
    assert!(matches!(error, Error::BadLogin { .. }), "{error}");
}

#[tokio::test]
async fn a_login_that_a_token_server_refuses_is_said_to_be_that() {
    let fake = Fake::start(|asked| {
        let host = &asked.headers["host"];
        let text = format!(r#"Bearer realm="http://{host}/token",service="s""#);
        Reply::new(401, r#"{"details":"wrong password"}"#).header("www-authenticate", text)
    })
    .await;
    let login = Login::Password { username: "u".into(), password: "wrong".into() };
    let error = client(Known::default()).check_login(&fake.host, &login).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("does not take this login: wrong password"), "{text}");
    // Of nobody, it is the image that is refused.
    let of = fake.reference("a/b");
    let error = client(Known::default()).resolve(&of).await.unwrap_err();
    assert!(matches!(error, Error::Denied { anonymous: true, .. }), "{error}");
}

fn takes_uploads(place: String) -> impl Fn(&crate::fake::Asked) -> Reply {
    move |asked| match asked.method.as_str() {
        "HEAD" => Reply::new(404, ""),
        "POST" => Reply::new(202, "").header("location", place.clone()),
        _ => Reply::new(201, ""),
    }
}

#[tokio::test]
async fn an_upload_tells_how_far_it_is() {
    let fake = Fake::start(takes_uploads("/v2/a/b/blobs/uploads/1".to_owned())).await;
    let dir = tempfile::tempdir().unwrap();
    let (file, bytes) = (dir.path().join("layer"), vec![7; 4 << 20]);
    std::fs::write(&file, &bytes).unwrap();
    let told = parking_lot::Mutex::new(Vec::new());
    let tell = |bytes| told.lock().push(bytes);
    let (client, layer) = (client(Known::default()), blob(&bytes, "l"));
    let to = fake.reference("a/b:1");
    assert_eq!(client.push_file(&to, &layer, &file, None, &tell).await.unwrap(), Placed::Sent);
    let told = told.into_inner();
    assert!(told.is_sorted() && told.iter().any(|&at| at > 0 && at < layer.size), "{told:?}");
}

#[tokio::test]
async fn a_registry_that_takes_no_more_of_an_upload_is_given_up() {
    // It listens, and reads nothing.
    let deaf = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = format!("http://{}/upload", deaf.local_addr().unwrap());
    let fake = Fake::start(takes_uploads(place)).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("layer");
    let size = 64 << 20;
    std::fs::File::create(&file).unwrap().set_len(size).unwrap();
    let layer = Descriptor { size, ..blob(b"any", "l") };
    let (client, to) = (client(Known::default()), fake.reference("a/b:1"));
    let push = client.push_file(&to, &layer, &file, None, &|_| {});
    let pushed = tokio::time::timeout(std::time::Duration::from_secs(60), push).await;
    let error = pushed.expect("it gives up").unwrap_err();
    assert!(error.to_string().contains("in the middle of an upload"), "{error}");
}
