//! Webhooks: who is told of events by signed HTTP requests.
//!
//! - The ledger is the outbox: a delivery is recorded with its event, in one transaction, and stays until it was
//!   answered with 2xx or is given up. So each event of a webhook is sent at least once, whatever is killed when;
//!   a receiver knows by `webhook-id` what it had before.
//! - Secrets are sealed in the ledger and told once, when they are made.
//! - Where requests may go is decided by [`torpor_egress::outgoing`].

mod deliver;
mod sign;
mod verdict;

use torpor_egress::outgoing::SendError;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::event::{
    CreateWebhook, Delivery, DeliveryState, Event, EventKind, NewWebhook, UpdateWebhook, Webhook,
};
use torpor_protocol::spec::Pairs;
use torpor_protocol::{DeliveryId, ErrorCode, EventId, WebhookId};
use torpor_store::{Addressee, NewDelivery, SealedCallback};

use crate::Service;
use crate::admission::check_labels;
use crate::error::{Error, Result};

pub use deliver::deliver;

/// How long the secret before is good after a webhook got another one: time for a receiver to learn it.
const PREVIOUS_MS: u64 = 24 * 60 * 60 * 1000;
/// Types that a webhook can name: more would name one twice.
const TYPES_MAX: usize = EventKind::ALL.len();

pub async fn create(app: &Service, request: CreateWebhook) -> Result<NewWebhook> {
    let CreateWebhook { url, types, labels } = request;
    check(app, Some(&url), Some(&types), Some(&labels))?;
    let webhook = Webhook {
        id: WebhookId::random(),
        url,
        types,
        labels,
        enabled: true,
        disabled_reason: None,
        created_at_ms: app.fleet.clock().now_ms(),
        last: None,
    };
    let (secret, sealed) = app.vault.make_webhook_secret(webhook.id.as_str())?;
    match app.ledger.create_webhook(&webhook, &sealed).await {
        Ok(()) => Ok(NewWebhook { webhook, secret }),
        Err(StoreError::Invalid(text)) => Err(Error::new(ErrorCode::LimitReached, text)),
        Err(error) => Err(error.into()),
    }
}

/// At most `limit` after this one, by id.
pub async fn list(app: &Service, after: Option<&WebhookId>, limit: usize) -> Result<Vec<Webhook>> {
    Ok(app.ledger.webhooks(after, limit).await?)
}

pub async fn find(app: &Service, id: &WebhookId) -> Result<Webhook> {
    app.ledger.find_webhook(id).await?.ok_or_else(|| missing(id))
}

pub async fn update(app: &Service, id: &WebhookId, changes: &UpdateWebhook) -> Result<Webhook> {
    let UpdateWebhook { url, types, labels, enabled: _ } = changes;
    check(app, url.as_deref(), types.as_deref(), labels.as_ref())?;
    let webhook = app.ledger.update_webhook(id, changes).await?;
    app.events.hint();
    webhook.ok_or_else(|| missing(id))
}

/// Gives it another secret. The present one signs, too, for a day.
pub async fn rotate(app: &Service, id: &WebhookId) -> Result<NewWebhook> {
    let (secret, sealed) = app.vault.make_webhook_secret(id.as_str())?;
    let until_ms = app.fleet.clock().now_ms().saturating_add(PREVIOUS_MS);
    let webhook = app.ledger.rotate_webhook(id, &sealed, until_ms).await?;
    Ok(NewWebhook { webhook: webhook.ok_or_else(|| missing(id))?, secret })
}

/// Forgets it, with what was to be sent to it.
pub async fn remove(app: &Service, id: &WebhookId) -> Result<()> {
    if app.ledger.erase_webhook(id).await? { Ok(()) } else { Err(missing(id)) }
}

/// Sends it an event that nobody else is told of.
pub async fn test(app: &Service, id: &WebhookId) -> Result<Delivery> {
    enabled(app, id).await?;
    let event = Event {
        id: EventId::random(),
        sequence: 0,
        kind: EventKind::WebhookTest,
        at_ms: app.fleet.clock().now_ms(),
        subject: id.to_string(),
        data: serde_json::json!({}),
    };
    let delivery = NewDelivery {
        id: DeliveryId::random(),
        event: event.id.clone(),
        kind: event.kind,
        subject: event.subject.clone(),
        body: serde_json::to_string(&event).map_err(StoreError::failed("write an event"))?,
        to: Addressee::Webhook(id.clone()),
        created_at_ms: event.at_ms,
    };
    app.ledger.record_delivery(&delivery).await?;
    app.events.hint();
    Ok(Delivery {
        id: delivery.id,
        event: event.id,
        kind: event.kind,
        subject: event.subject,
        state: DeliveryState::Pending,
        attempts: 0,
        created_at_ms: event.at_ms,
        next_at_ms: None,
        last: None,
    })
}

/// Nothing is on its way to one that is not.
async fn enabled(app: &Service, id: &WebhookId) -> Result<()> {
    if find(app, id).await?.enabled {
        return Ok(());
    }
    let hint = format!("torpor webhook update {id} --enable");
    let text = format!("nothing is sent to webhook {id}, which is not enabled");
    Err(Error::with_hint(ErrorCode::InvalidRequest, text, hint))
}

/// At most `limit` before this place, newest first.
pub async fn deliveries(
    app: &Service,
    id: &WebhookId,
    before: Option<&Place<DeliveryId>>,
    limit: usize,
) -> Result<Vec<Delivery>> {
    find(app, id).await?;
    Ok(app.ledger.deliveries(id, before, limit).await?)
}

/// Sends it once more, as if it had never been tried.
pub async fn redeliver(app: &Service, id: &WebhookId, delivery: &DeliveryId) -> Result<Delivery> {
    enabled(app, id).await?;
    let again = app.ledger.redeliver(id, delivery).await?;
    app.events.hint();
    let text = || format!("webhook {id} has no delivery {delivery}: the oldest are forgotten");
    again.ok_or_else(|| Error::new(ErrorCode::NotFound, text()))
}

/// What is to be sent once, to a URL that is no webhook, signed with this secret: checked and sealed, long before it
/// is known what.
pub fn callback(app: &Service, url: &str, secret: &str) -> Result<SealedCallback> {
    app.egress.outgoing().check(url).map_err(refused)?;
    let delivery = DeliveryId::random();
    let secret = app.vault.seal_webhook_secret(delivery.as_str(), secret)?;
    Ok(SealedCallback { delivery, url: url.to_owned(), secret })
}

fn check(
    app: &Service,
    url: Option<&str>,
    types: Option<&[EventKind]>,
    labels: Option<&Pairs>,
) -> Result<()> {
    if let Some(url) = url {
        app.egress.outgoing().check(url).map_err(refused)?;
    }
    if types.is_some_and(|types| types.len() > TYPES_MAX) {
        return Err(Error::invalid(format!("types: at most {TYPES_MAX} can be named")));
    }
    if let Some(kind) = types.unwrap_or_default().iter().find(|kind| !kind.is_for_all()) {
        return Err(Error::with_hint(
            ErrorCode::InvalidRequest,
            format!("types: no webhook is told of {kind} because it asks for it"),
            "callbacks are told of invocations, and `torpor webhook test` tells of tests",
        ));
    }
    Ok(labels.map_or(Ok(()), check_labels)?)
}

fn refused(error: SendError) -> Error {
    Error::invalid(format!("url: {error}"))
}

fn missing(id: &WebhookId) -> Error {
    let text = format!("there is no webhook {id}");
    Error::with_hint(ErrorCode::NotFound, text, "`torpor webhook ls` lists them")
}
