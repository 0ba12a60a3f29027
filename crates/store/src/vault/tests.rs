//! What the vault promises.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};
use torpor_lifecycle::store::Vault as _;

use super::*;

const VALUE: &str = "correct horse battery staple";

struct World {
    vault: Vault,
    ledger: Ledger,
    layout: Layout,
    dir: tempfile::TempDir,
}

async fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let ledger = Ledger::open(&layout).await.unwrap();
    let vault = Vault::open(ledger.clone(), &layout, None).unwrap();
    World { vault, ledger, layout, dir }
}

impl World {
    fn with_key(&self, key: &str) -> Result<Vault, StoreError> {
        Vault::open(self.ledger.clone(), &self.layout, Some(key))
    }

    /// Does something to the database behind the ledger's back.
    async fn tamper(&self, sql: &'static str) {
        let options = SqliteConnectOptions::new().filename(self.layout.ledger());
        let mut connection = options.connect().await.unwrap();
        let done = sqlx::query(sql).execute(&mut connection).await.unwrap();
        assert!(done.rows_affected() > 0, "{sql}");
        connection.close().await.unwrap();
    }
}

fn name(text: &str) -> SecretName {
    text.parse().unwrap()
}

async fn value_of(vault: &Vault, text: &str) -> Result<String, StoreError> {
    let mut values = vault.reveal(&[name(text)]).await?;
    Ok(values.remove(text).unwrap())
}

fn contains(path: &Path, needle: &[u8]) -> bool {
    std::fs::read(path).unwrap().windows(needle.len()).any(|window| window == needle)
}

#[tokio::test]
async fn a_secret_has_the_value_it_was_given_last_also_after_a_restart() {
    let world = world().await;
    let first = world.vault.set(&name("TOKEN"), "old", None).await.unwrap();
    assert_eq!((first.version, first.created_at_ms), (1, first.updated_at_ms));
    let second = world.vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
    assert_eq!((second.version, second.created_at_ms), (2, first.created_at_ms));
    world.vault.set(&name("EMPTY"), "", None).await.unwrap();
    let again = Vault::open(world.ledger.clone(), &world.layout, None).unwrap();
    assert_eq!(value_of(&again, "TOKEN").await.unwrap(), VALUE);
    let both = again.reveal(&[name("TOKEN"), name("EMPTY")]).await.unwrap();
    let expected = [("EMPTY", ""), ("TOKEN", VALUE)];
    assert_eq!(both, expected.map(|(a, b)| (a.to_owned(), b.to_owned())).into());
    assert_eq!(again.reveal(&[]).await.unwrap(), BTreeMap::new());
    let listed = again.list(None, 9).await.unwrap();
    assert_eq!(listed.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["EMPTY", "TOKEN"]);
    assert_eq!(again.find(&name("TOKEN")).await.unwrap(), Some(second));
}

#[tokio::test]
async fn a_secret_that_was_removed_is_missed_by_name() {
    let world = world().await;
    world.vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
    assert!(world.vault.remove(&name("TOKEN")).await.unwrap());
    assert!(!world.vault.remove(&name("TOKEN")).await.unwrap());
    assert_eq!(world.vault.find(&name("TOKEN")).await.unwrap(), None);
    world.vault.set(&name("THERE"), VALUE, None).await.unwrap();
    let wanted = [name("THERE"), name("TOKEN"), name("OTHER")];
    let error = world.vault.reveal(&wanted).await.unwrap_err();
    assert!(matches!(&error, StoreError::NoSuchSecret(name) if name == "TOKEN"), "{error:?}");
}

#[tokio::test]
async fn no_file_of_the_data_directory_holds_a_value_and_the_ledger_no_key() {
    let world = world().await;
    world.vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
    let key = std::fs::read(world.layout.secret_key()).unwrap();
    let mut looked_at = Vec::new();
    for closed in [false, true] {
        if closed {
            world.ledger.close().await;
        }
        for entry in std::fs::read_dir(world.dir.path()).unwrap().flatten() {
            if !entry.file_type().unwrap().is_file() {
                continue;
            }
            let path = entry.path();
            assert!(!contains(&path, VALUE.as_bytes()), "{}", path.display());
            assert!(path == world.layout.secret_key() || !contains(&path, &key));
            looked_at.push(entry.file_name().into_string().unwrap());
        }
    }
    // The row was in what was looked at: first in the log, then in the database.
    assert!(looked_at.contains(&"ledger.db-wal".to_owned()), "{looked_at:?}");
    assert!(contains(&world.layout.ledger(), b"TOKEN"));
}

#[tokio::test]
async fn the_key_is_made_once_and_for_its_owner_only() {
    let world = world().await;
    let path = world.layout.secret_key();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    let key = std::fs::read(&path).unwrap();
    assert_eq!(key.len(), 32);
    Vault::open(world.ledger.clone(), &world.layout, None).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), key);
    assert!(!path.with_extension("draft").exists());
    let other = self::world().await;
    assert_ne!(std::fs::read(other.layout.secret_key()).unwrap(), key);
}

#[tokio::test]
async fn a_key_that_is_given_is_used_in_either_writing_and_none_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let ledger = Ledger::open(&layout).await.unwrap();
    let hex = "00".repeat(31) + "fB";
    let vault = Vault::open(ledger.clone(), &layout, Some(&hex)).unwrap();
    assert!(!layout.secret_key().exists());
    vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
    let base64 = "A".repeat(41) + "Ps";
    for same in [format!("{base64}="), base64, format!(" {}\n", hex.to_lowercase())] {
        let vault = Vault::open(ledger.clone(), &layout, Some(&same)).unwrap();
        assert_eq!(value_of(&vault, "TOKEN").await.unwrap(), VALUE, "{same}");
    }
}

#[tokio::test]
async fn what_is_no_key_is_refused_with_what_would_be_right_and_not_repeated() {
    let world = world().await;
    let short = "ab".repeat(31);
    for wrong in ["", "secretsecret", &short, &"xy".repeat(32), &"ab".repeat(33), &"é".repeat(32)]
    {
        let error = world.with_key(wrong).unwrap_err();
        assert!(matches!(error, StoreError::Invalid(_)), "{wrong}: {error:?}");
        let text = error.to_string();
        assert!(text.contains("64 hexadecimal digits or in base64"), "{text}");
        assert!(wrong.is_empty() || !text.contains(wrong), "{text}");
    }
    std::fs::write(world.layout.secret_key(), "too short").unwrap();
    let error = Vault::open(world.ledger.clone(), &world.layout, None).unwrap_err().to_string();
    assert!(error.contains("secret.key is no secret key, which has 32 bytes"), "{error}");
    assert_eq!(std::fs::read(world.layout.secret_key()).unwrap(), b"too short");
}

#[tokio::test]
async fn under_another_key_a_secret_does_not_open_and_says_so() {
    let world = world().await;
    world.vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
    let other = world.with_key(&"5".repeat(64)).unwrap();
    let error = value_of(&other, "TOKEN").await.unwrap_err().to_string();
    assert!(error.contains("secret TOKEN can't be decrypted"), "{error}");
    assert_eq!(other.list(None, 9).await.unwrap().len(), 1);
    // Set again, it is readable with the new key and no longer with the old one.
    other.set(&name("TOKEN"), "new", None).await.unwrap();
    assert_eq!(value_of(&other, "TOKEN").await.unwrap(), "new");
    value_of(&world.vault, "TOKEN").await.unwrap_err();
}

#[tokio::test]
async fn a_row_that_was_swapped_changed_or_made_newer_does_not_open() {
    let tampered = [
        "UPDATE secrets SET name = 'TOKEN' WHERE name = 'OTHER'",
        "UPDATE secrets SET version = 2 WHERE name = 'TOKEN'",
        "UPDATE secrets SET nonce = x'00' WHERE name = 'TOKEN'",
        "UPDATE secrets SET sealed = x'' WHERE name = 'TOKEN'",
        "UPDATE secrets SET sealed = randomblob(length(sealed)) WHERE name = 'TOKEN'",
    ];
    for sql in tampered {
        let world = world().await;
        world.vault.set(&name("OTHER"), "other", None).await.unwrap();
        if !sql.contains("OTHER") {
            world.vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
            assert_eq!(value_of(&world.vault, "TOKEN").await.unwrap(), VALUE);
        }
        world.tamper(sql).await;
        let error = value_of(&world.vault, "TOKEN").await.unwrap_err().to_string();
        assert!(error.contains("can't be decrypted"), "{sql}: {error}");
    }
}

#[tokio::test]
async fn the_same_value_never_looks_the_same() {
    let world = world().await;
    let mut seen = std::collections::HashSet::new();
    for _ in 0..3 {
        world.vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
        let (_, sealed) = world.ledger.secret(&name("TOKEN")).await.unwrap().unwrap();
        assert!(seen.insert(sealed.nonce) & seen.insert(sealed.bytes));
        assert!(world.vault.remove(&name("TOKEN")).await.unwrap());
    }
}

#[tokio::test]
async fn a_value_has_bounds() {
    let world = world().await;
    let longest = "x".repeat(64 * 1024);
    world.vault.set(&name("LONG"), &longest, None).await.unwrap();
    assert_eq!(value_of(&world.vault, "LONG").await.unwrap(), longest);
    for wrong in [longest.clone() + "y", "a\0b".to_owned()] {
        let error = world.vault.set(&name("LONG"), &wrong, None).await.unwrap_err();
        assert!(matches!(error, StoreError::Invalid(_)), "{error:?}");
    }
    assert_eq!(world.vault.find(&name("LONG")).await.unwrap().unwrap().version, 1);
}

#[tokio::test]
async fn nothing_that_is_printed_shows_a_value_or_the_key() {
    let world = world().await;
    let vault = world.with_key(&"ab".repeat(32)).unwrap();
    vault.set(&name("TOKEN"), VALUE, None).await.unwrap();
    let row = world.ledger.secret(&name("TOKEN")).await.unwrap();
    let shown = format!("{vault:?} {row:?} {:?}", vault.list(None, 9).await.unwrap());
    // 171 is 0xab.
    for hidden in [VALUE, "abab", "171, 171", "[171"] {
        assert!(!shown.contains(hidden), "{shown}");
    }
    assert!(shown.contains("Key(…)"), "{shown}");
}

#[tokio::test]
async fn a_seal_depends_on_the_key_the_context_and_every_part() {
    let world = world().await;
    let seal = world.vault.seal("upload", &["ab", "c"]);
    assert_eq!(seal.len(), 64);
    assert!(seal.bytes().all(|b| b.is_ascii_hexdigit()));
    let again = Vault::open(world.ledger.clone(), &world.layout, None).unwrap();
    assert_eq!(again.seal("upload", &["ab", "c"]), seal);
    let other = world.with_key(&"5".repeat(64)).unwrap();
    assert_ne!(other.seal("upload", &["ab", "c"]), seal);
    let different: [(&str, &[&str]); 6] = [
        ("preview", &["ab", "c"]),
        ("upload", &["a", "bc"]),
        ("upload", &["abc"]),
        ("upload", &["ab", "c", ""]),
        ("upload", &["c", "ab"]),
        ("uploadab", &["", "c"]),
    ];
    for (context, parts) in different {
        assert_ne!(world.vault.seal(context, parts), seal, "{context} {parts:?}");
        assert!(!world.vault.sealed(context, parts, &seal), "{context} {parts:?}");
    }
    assert!(world.vault.sealed("upload", &["ab", "c"], &seal));
    for wrong in ["", "x", &seal[1..], &seal.replace(&seal[..1], "g")] {
        assert!(!world.vault.sealed("upload", &["ab", "c"], wrong), "{wrong}");
    }
}

// === Requests that may be repeated ===

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

fn kept(body: &str) -> KeptAnswer {
    KeptAnswer { status: 201, content_type: Some("application/json".into()), body: body.into() }
}

#[tokio::test]
async fn a_request_is_known_for_a_day_with_its_answer_and_by_its_key_only() {
    let world = world().await;
    let request = world.vault.request_key("me", "k", &["/v1/sandboxes", "{}"]);
    assert_eq!(world.vault.begin_request(&request, 1).await.unwrap(), Repeated::New);
    assert_eq!(world.vault.begin_request(&request, 2).await.unwrap(), Repeated::Unanswered);
    world.vault.keep_answer(&request, &kept("secret")).await.unwrap();
    let answered = Repeated::Answered(kept("secret"));
    assert_eq!(world.vault.begin_request(&request, DAY_MS).await.unwrap(), answered);
    let other = world.vault.request_key("me", "k", &["/v1/sandboxes", "{ }"]);
    assert_eq!(world.vault.begin_request(&other, 3).await.unwrap(), Repeated::Other);
    let theirs = world.vault.request_key("them", "k", &["/v1/sandboxes", "{}"]);
    assert_eq!(world.vault.begin_request(&theirs, 3).await.unwrap(), Repeated::New);
    assert_eq!(world.vault.begin_request(&request, DAY_MS + 2).await.unwrap(), Repeated::New);
}

#[tokio::test]
async fn an_answer_that_is_too_large_or_under_another_secret_key_is_not_known() {
    let world = world().await;
    let large = world.vault.request_key("me", "large", &[]);
    world.vault.begin_request(&large, 1).await.unwrap();
    world.vault.keep_answer(&large, &kept(&"x".repeat(300 * 1024))).await.unwrap();
    assert_eq!(world.vault.begin_request(&large, 1).await.unwrap(), Repeated::Unanswered);
    let request = world.vault.request_key("me", "k", &[]);
    world.vault.begin_request(&request, 1).await.unwrap();
    world.vault.keep_answer(&request, &kept("{}")).await.unwrap();
    let stranger = world.with_key(&"ab".repeat(32)).unwrap();
    assert_eq!(stranger.begin_request(&request, 1).await.unwrap(), Repeated::Unanswered);
}
