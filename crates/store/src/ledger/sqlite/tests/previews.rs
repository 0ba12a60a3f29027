//! Previews and their tokens.

use std::num::NonZeroU16;

use torpor_protocol::preview::{Preview, PreviewLabel};
use torpor_protocol::{PreviewId, PreviewTarget, TokenId};

use super::*;
use crate::{PreviewLedger as _, TokenRow};

fn preview(sandbox: &SandboxId, name: &str, prefix: Option<&str>) -> Preview {
    let label = prefix.map(|text| text.parse().unwrap());
    Preview {
        id: PreviewId::random(),
        name: name.parse().unwrap(),
        target: PreviewTarget::Sandbox(sandbox.clone()),
        port: NonZeroU16::new(3000).unwrap(),
        public: false,
        prefix: label.is_some(),
        label: label.unwrap_or_else(PreviewLabel::random),
        urls: Vec::new(),
        expires_at_ms: Some(7),
        request_headers: BTreeMap::from([("x-a".to_owned(), "ü 'quoted'".to_owned())]),
        response_headers: BTreeMap::new(),
        cors: vec!["https://a.example".to_owned()],
        keep_open: true,
        created_at_ms: 5,
        updated_at_ms: 6,
    }
}

fn token(of: &Preview, byte: u8) -> TokenRow {
    TokenRow {
        id: TokenId::random(),
        preview: of.id.clone(),
        hash: [byte; 32],
        expires_at_ms: (byte > 1).then_some(9),
        created_at_ms: u64::from(byte),
    }
}

/// A world with an image and this sandbox.
async fn with_sandbox() -> (World, Record) {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None, None).await.unwrap();
    let sandbox = record(&image.id, Some("web"));
    world.record(&sandbox).await.unwrap();
    (world, sandbox)
}

#[tokio::test]
async fn a_preview_comes_back_as_it_was_also_after_a_restart_but_without_urls() {
    let (world, sandbox) = with_sandbox().await;
    let mut kept = preview(&sandbox.id, "web", Some("my-app"));
    let shown = Preview { urls: vec!["http://my-app.localhost/".to_owned()], ..kept.clone() };
    world.ledger.record_preview(&shown).await.unwrap();
    let (one, two) = (token(&kept, 1), token(&kept, 2));
    world.ledger.record_preview_token(&two).await.unwrap();
    world.ledger.record_preview_token(&one).await.unwrap();
    kept.public = true;
    world.ledger.record_preview(&kept).await.unwrap();
    world.ledger.close().await;
    let again = SqliteLedger::open(&world.layout).await.unwrap();
    assert_eq!(again.previews(None, 9).await.unwrap(), [kept]);
    let mut tokens = [one, two];
    tokens.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(again.preview_tokens(None, 9).await.unwrap(), tokens);
}

#[tokio::test]
async fn previews_and_tokens_go_in_the_instant_their_sandbox_goes() {
    let (world, sandbox) = with_sandbox().await;
    let gone = preview(&sandbox.id, "web", None);
    world.ledger.record_preview(&gone).await.unwrap();
    world.ledger.record_preview_token(&token(&gone, 1)).await.unwrap();
    world.record(&sandbox).await.unwrap();
    assert_eq!(
        world.ledger.previews(None, 9).await.unwrap().len(),
        1,
        "a sandbox that changes keeps it"
    );
    world.archive(&sandbox.ended(9, None)).await.unwrap();
    assert_eq!(world.ledger.previews(None, 9).await.unwrap(), []);
    assert_eq!(world.ledger.preview_tokens(None, 9).await.unwrap(), []);
    let error = world.ledger.record_preview(&gone).await.unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(text) if text.contains("is gone")), "{error}");
    let error = world.ledger.record_preview_token(&token(&gone, 2)).await.unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(text) if text.contains("is gone")), "{error}");
}

#[tokio::test]
async fn a_label_belongs_to_one_preview_and_a_name_to_one_of_a_sandbox() {
    let (world, sandbox) = with_sandbox().await;
    world.ledger.record_preview(&preview(&sandbox.id, "a", Some("app"))).await.unwrap();
    for taken in [preview(&sandbox.id, "b", Some("app")), preview(&sandbox.id, "a", None)] {
        assert!(world.ledger.record_preview(&taken).await.is_err(), "{taken:?}");
    }
    let other = record(&sandbox.spec.image_id, None);
    world.record(&other).await.unwrap();
    world.ledger.record_preview(&preview(&other.id, "a", None)).await.unwrap();
}

#[tokio::test]
async fn what_is_erased_is_gone_once() {
    let (world, sandbox) = with_sandbox().await;
    let gone = preview(&sandbox.id, "web", None);
    world.ledger.record_preview(&gone).await.unwrap();
    let (one, two) = (token(&gone, 1), token(&gone, 2));
    world.ledger.record_preview_token(&one).await.unwrap();
    world.ledger.record_preview_token(&two).await.unwrap();
    assert!(world.ledger.erase_preview_token(&one.id).await.unwrap());
    assert!(!world.ledger.erase_preview_token(&one.id).await.unwrap());
    assert_eq!(world.ledger.preview_tokens(None, 9).await.unwrap(), [two]);
    assert!(world.ledger.erase_preview(&gone.id).await.unwrap());
    assert!(!world.ledger.erase_preview(&gone.id).await.unwrap());
    assert_eq!(world.ledger.preview_tokens(None, 9).await.unwrap(), []);
}
