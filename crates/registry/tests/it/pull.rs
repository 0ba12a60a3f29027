//! Pulls.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use torpor_registry::{Client, Digest, Error, Login, Reference, RegistrySettings, Result};

use crate::fake::{Asked, Fake, Known, Reply, Sample, client, client_with};

/// Resolves and fetches the only layer.
async fn pull(client: &Client, of: &Reference, dir: &TempDir) -> Result<Vec<u8>> {
    let remote = client.resolve(of).await?;
    let file = dir.path().join("part");
    client.fetch(of, &remote.manifest.layers[0], &file, &|_| {}).await?;
    Ok(std::fs::read(file).unwrap())
}

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test]
async fn an_image_of_several_platforms_is_pulled_for_this_one() {
    let sample = Sample::new(100_000);
    let told = sample.clone();
    let fake = Fake::start(move |asked| told.answer(asked)).await;
    let of = fake.reference("a/b");
    let remote = client(Known::default()).resolve(&of).await.unwrap();
    assert_eq!(remote.digest, Digest::of(&sample.index), "what the tag named is what is pinned");
    assert_eq!(remote.manifest_bytes, sample.manifest);
    assert_eq!(remote.config, sample.config);
    assert_eq!(pull(&client(Known::default()), &of, &dir()).await.unwrap(), sample.layer);
    let pinned = of.pinned(remote.digest);
    assert_eq!(pull(&client(Known::default()), &pinned, &dir()).await.unwrap(), sample.layer);
}

#[tokio::test]
async fn cut_connections_are_gone_on_from() {
    let sample = Sample::new(300_000);
    let told = sample.clone();
    let fake = Fake::start(move |asked| {
        let mut reply = told.answer(asked);
        if told.is_layer(asked) && reply.body.len() > 50_000 {
            reply.cut = Some(50_000);
        }
        reply
    })
    .await;
    let found = pull(&client(Known::default()), &fake.reference("a/b"), &dir()).await.unwrap();
    assert_eq!(found, sample.layer);
    let asked = fake.asked.lock().clone();
    let from: Vec<_> = asked.iter().filter(|a| sample.is_layer(a)).map(Asked::from).collect();
    assert_eq!(from, [0, 50_000, 100_000, 150_000, 200_000, 250_000]);
}

#[tokio::test]
async fn what_an_earlier_attempt_left_is_used() {
    let sample = Sample::new(90_000);
    let told = sample.clone();
    let fake = Fake::start(move |asked| told.answer(asked)).await;
    let dir = dir();
    std::fs::write(dir.path().join("part"), &sample.layer[..70_000]).unwrap();
    let found = pull(&client(Known::default()), &fake.reference("a/b"), &dir).await.unwrap();
    assert_eq!(found, sample.layer);
    assert_eq!(fake.asked.lock().last().unwrap().from(), 70_000);
}

#[tokio::test]
async fn a_registry_that_can_not_go_on_starts_again() {
    let sample = Sample::new(90_000);
    for status in [200, 416] {
        let told = sample.clone();
        let fake = Fake::start(move |asked| match told.is_layer(asked) && asked.from() > 0 {
            true if status == 416 => Reply::new(416, ""),
            true | false => Reply { status: 200, ..told.answer(&whole(asked)) },
        })
        .await;
        let dir = dir();
        std::fs::write(dir.path().join("part"), &sample.layer[..70_000]).unwrap();
        let found = pull(&client(Known::default()), &fake.reference("a/b"), &dir).await.unwrap();
        assert_eq!(found, sample.layer, "{status}");
    }
}

fn whole(asked: &Asked) -> Asked {
    let mut asked = asked.clone();
    asked.headers.remove("range");
    asked
}

#[tokio::test]
async fn wrong_bytes_are_refused_and_nothing_of_them_is_kept() {
    let sample = Sample::new(1000);
    for change in ["other", "longer"] {
        let told = sample.clone();
        let fake = Fake::start(move |asked| {
            let mut reply = told.answer(asked);
            if told.is_layer(asked) {
                match change {
                    "other" => reply.body[3] ^= 1,
                    _ => reply.body.push(0),
                }
            }
            reply
        })
        .await;
        let dir = dir();
        let error =
            pull(&client(Known::default()), &fake.reference("a/b"), &dir).await.unwrap_err();
        let as_expected = match change {
            "other" => matches!(error, Error::Wrong { .. }),
            _ => matches!(error, Error::TooLarge { limit: 1000, .. }),
        };
        assert!(as_expected, "{change}: {error}");
        assert_eq!(std::fs::read(dir.path().join("part")).unwrap(), b"", "{change}");
    }
}

#[tokio::test]
async fn a_manifest_under_another_digest_is_refused() {
    let sample = Sample::new(10);
    let fake = Fake::start(move |_| Reply::ok(r#"{"schemaVersion":2,"manifests":[]}"#)).await;
    let pinned = fake.reference("a/b").pinned(Digest::of(&sample.index));
    let error = client(Known::default()).resolve(&pinned).await.unwrap_err();
    assert!(matches!(error, Error::Wrong { .. }), "{error}");
}

#[tokio::test]
async fn huge_manifests_and_token_answers_are_not_read_to_their_end() {
    let fake = Fake::start(|_| Reply::ok(vec![b' '; 5 * 1024 * 1024])).await;
    let error = client(Known::default()).resolve(&fake.reference("a/b")).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    let fake = Fake::start(|asked| match asked.path.starts_with("/token") {
        true => Reply::ok(vec![b' '; 1024 * 1024]),
        false => challenge(asked),
    })
    .await;
    let error = client(Known::default()).resolve(&fake.reference("a/b")).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}

fn challenge(asked: &Asked) -> Reply {
    let host = &asked.headers["host"];
    let text = format!(r#"Bearer realm="http://{host}/token",service="s""#);
    Reply::new(401, "{}").header("www-authenticate", text)
}

#[tokio::test]
async fn a_registry_that_never_has_enough_proof_is_given_up() {
    let fake = Fake::start(|asked| match asked.path.starts_with("/token") {
        true => Reply::ok(r#"{"token":"t"}"#),
        false => challenge(asked),
    })
    .await;
    let error = client(Known::default()).resolve(&fake.reference("a/b")).await.unwrap_err();
    assert!(matches!(error, Error::Denied { anonymous: true, .. }), "{error}");
    assert_eq!((fake.count("/v2/"), fake.count("/token")), (2, 1));
}

#[tokio::test]
async fn a_password_goes_to_the_token_server_and_a_token_to_the_registry() {
    let sample = Sample::new(10);
    let told = sample.clone();
    let fake = Fake::start(move |asked| match asked.path.starts_with("/token") {
        true => Reply::ok(r#"{"access_token":"t0ken"}"#),
        false if asked.authorization() == Some("Bearer t0ken") => told.answer(asked),
        false => challenge(asked),
    })
    .await;
    let login = Login::Password { username: "u".to_owned(), password: "p".to_owned() };
    let client = client(Known(Some((fake.host.clone(), login))));
    pull(&client, &fake.reference("a/b"), &dir()).await.unwrap();
    let asked = fake.asked.lock().clone();
    for asked in &asked {
        let basic = asked.authorization().is_some_and(|header| header.starts_with("Basic "));
        assert_eq!(basic, asked.path.starts_with("/token"), "{asked:?}");
    }
    let token = asked.iter().find(|asked| asked.path.starts_with("/token")).unwrap();
    assert_eq!(token.path, "/token?scope=repository%3Aa%2Fb%3Apull&service=s");
    assert_eq!(fake.count("/token"), 1, "a token is used as long as it is good");
}

#[tokio::test]
async fn a_redirect_takes_no_password_along_and_ends_some_time() {
    let sample = Sample::new(5000);
    let layer = sample.layer.clone();
    let elsewhere = Fake::start(move |asked| Reply::range(&layer, asked)).await;
    let told = sample.clone();
    let to = elsewhere.host.replace("127.0.0.1", "localhost");
    let fake = Fake::start(move |asked| match (asked.authorization(), told.is_layer(asked)) {
        (None, _) => Reply::new(401, "").header("www-authenticate", "Basic realm=x"),
        (Some(_), true) => Reply::new(307, "").header("location", format!("http://{to}/cdn?sig=1")),
        (Some(_), false) => told.answer(asked),
    })
    .await;
    let login = Login::Password { username: "u".to_owned(), password: "p".to_owned() };
    let known = client(Known(Some((fake.host.clone(), login))));
    assert_eq!(pull(&known, &fake.reference("a/b"), &dir()).await.unwrap(), sample.layer);
    let asked = elsewhere.asked.lock().clone();
    assert_eq!((asked[0].path.as_str(), asked[0].authorization()), ("/cdn?sig=1", None));

    let fake =
        Fake::start(|asked| Reply::new(302, "").header("location", asked.path.clone())).await;
    let error = client(Known::default()).resolve(&fake.reference("a/b")).await.unwrap_err();
    assert!(matches!(error, Error::Garbled { .. }), "{error}");
    assert!(fake.count("/") <= 6, "{}", fake.count("/"));
}

#[tokio::test]
async fn a_registry_that_falls_silent_is_given_up() {
    let sample = Sample::new(50_000);
    for cut in [0, 100] {
        let told = sample.clone();
        let fake = Fake::start(move |asked| {
            let mut reply = told.answer(asked);
            if told.is_layer(asked) {
                (reply.cut, reply.stall) = (Some(cut), true);
            }
            reply
        })
        .await;
        let of = fake.reference("a/b");
        let (client, dir) = (client(Known::default()), dir());
        let pulled = tokio::time::timeout(Duration::from_secs(60), pull(&client, &of, &dir)).await;
        let error = pulled.expect("it gives up").unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_registry_that_is_busy_is_asked_again_unless_that_takes_long() {
    let sample = Sample::new(10);
    let (told, asked_before) = (sample.clone(), AtomicUsize::new(0));
    let fake = Fake::start(move |asked| match asked_before.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::new(429, "{}").header("retry-after", "0"),
        1 => Reply::new(503, "{}"),
        _ => told.answer(asked),
    })
    .await;
    pull(&client(Known::default()), &fake.reference("a/b"), &dir()).await.unwrap();
    let fake = Fake::start(|_| Reply::new(429, "{}").header("retry-after", "3600")).await;
    let error = client(Known::default()).resolve(&fake.reference("a/b")).await.unwrap_err();
    let retry_after = Some(Duration::from_secs(3600));
    assert_eq!(error, Error::RateLimited { registry: fake.host.clone(), retry_after });
    assert_eq!(fake.count("/"), 1);
}

#[tokio::test]
async fn mirrors_come_first_and_the_registry_has_what_they_lack() {
    let sample = Sample::new(5000);
    let told = sample.clone();
    let registry = Fake::start(move |asked| told.answer(asked)).await;
    let told = sample.clone();
    let mirror = Fake::start(move |asked| {
        let mut asked = asked.clone();
        asked.path = asked.path.replace("/v2/cache/", "/v2/");
        let mut reply = told.answer(&asked);
        if told.is_layer(&asked) {
            reply.body[0] ^= 1;
        }
        reply
    })
    .await;
    let gone = "http://127.0.0.1:1".to_owned();
    let mirrors = vec![gone, format!("http://{}/cache", mirror.host)];
    let about = RegistrySettings { mirrors, ..RegistrySettings::default() };
    let client = client_with(&registry.host, about);
    let found = pull(&client, &registry.reference("a/b"), &dir()).await.unwrap();
    assert_eq!(found, sample.layer, "what the mirror falsified came from the registry");
    assert_eq!(registry.count("/manifests/"), 0, "the mirror had the manifest");
}

#[tokio::test]
async fn what_is_not_there_or_not_for_us_is_said() {
    let sample = Sample::new(10);
    let told = sample.clone();
    let fake = Fake::start(move |asked| match asked.path.rsplit('/').next().unwrap() {
        "foreign" => Reply::ok(
            r#"{"schemaVersion":2,"manifests":[{"mediaType":"m","size":2,"digest":"sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
               "platform":{"os":"plan9","architecture":"mips"}}]}"#,
        ),
        "old" => Reply::ok(r#"{"schemaVersion":1,"fsLayers":[]}"#),
        "chart" => Reply::ok(
            String::from_utf8(told.manifest.clone()).unwrap().replace("oci.image.config", "helm"),
        ),
        "garbage" => Reply::ok("<html>hello</html>"),
        "private" => Reply::new(403, r#"{"errors":[{"message":"go \u001b[31maway"}]}"#),
        _ => told.answer(asked),
    })
    .await;
    let client = client(Known::default());
    let error = async |tag: &str| client.resolve(&fake.reference(tag)).await.unwrap_err();
    assert!(matches!(error("a/b:foreign").await, Error::NoPlatform { .. }));
    assert!(error("a/b:foreign").await.to_string().contains("plan9/mips"));
    assert!(matches!(error("a/b:old").await, Error::Unsupported { .. }));
    assert!(matches!(error("a/b:chart").await, Error::Unsupported { .. }));
    assert!(matches!(error("a/b:garbage").await, Error::Garbled { .. }));
    assert!(matches!(error("a/c:none").await, Error::NotFound { .. }));
    let denied = error("a/b:private").await.to_string();
    assert!(denied.contains("go [31maway"), "{denied:?} is printable");
    let nobody: Reference = "127.0.0.1:1/a".parse().unwrap();
    assert!(matches!(client.resolve(&nobody).await.unwrap_err(), Error::Unreachable { .. }));
}

#[tokio::test]
async fn what_somebody_else_falsified_is_not_held_against_an_honest_registry() {
    let sample = Sample::new(90_000);
    let told = sample.clone();
    let registry = Fake::start(move |asked| told.answer(asked)).await;
    let told = sample.clone();
    // It lies, and breaks off each time.
    let mirror = Fake::start(move |asked| {
        let mut reply = told.answer(asked);
        if told.is_layer(asked) {
            reply.body[0] ^= 1;
            reply.cut = Some(if asked.from() == 0 { 1000 } else { 0 });
        }
        reply
    })
    .await;
    let mirrors = vec![format!("http://{}", mirror.host)];
    let about = RegistrySettings { mirrors, ..RegistrySettings::default() };
    let (client, dir) = (client_with(&registry.host, about), dir());
    let found = pull(&client, &registry.reference("a/b"), &dir).await.unwrap();
    assert_eq!(found, sample.layer);
    let asked = registry.asked.lock().clone();
    let from: Vec<_> = asked.iter().filter(|a| sample.is_layer(a)).map(Asked::from).collect();
    assert_eq!(from, [1000, 0], "what was there was wrong, so all of it was asked for");

    // A whole file of an earlier daemon, and one that is wrong again.
    std::fs::write(dir.path().join("part"), vec![0; 90_000]).unwrap();
    let found = pull(&client, &registry.reference("a/b"), &dir).await.unwrap();
    assert_eq!(found, sample.layer);
}

#[tokio::test]
async fn a_token_server_without_a_token_is_not_believed() {
    for body in ["{}", r#"{"token":""}"#, r#"{"token":" "}"#, r#"{"access_token":""}"#] {
        let fake = Fake::start(move |asked| match asked.path.starts_with("/token") {
            true => Reply::ok(body),
            false => challenge(asked),
        })
        .await;
        let error = client(Known::default()).resolve(&fake.reference("a/b")).await.unwrap_err();
        assert!(error.to_string().contains("gives no token"), "{body}: {error}");
        assert_eq!(fake.count("/v2/"), 1, "{body}: nothing is sent for it");
    }
}
