//! Webhooks, and the outbox: what is to be sent to them, and what was. A delivery to a webhook is written with
//! its event, by the database itself; who sends it claims it for a while, and every later write of it says by
//! which attempt: whoever was replaced meanwhile changes nothing.

use async_trait::async_trait;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::event::{Delivery, DisabledReason, LastAttempt, UpdateWebhook, Webhook};
use torpor_protocol::{DeliveryId, EventId, EventKind, ServiceId, WebhookId};

use super::Sealed;

/// The secrets of a webhook.
#[derive(Debug)]
pub struct WebhookSecrets {
    pub present: Sealed,
    /// The one before, and until when it is good, too.
    pub previous: Option<(Sealed, u64)>,
}

/// Where a delivery goes, and what signs it.
#[derive(Debug)]
pub enum Target {
    Webhook {
        id: WebhookId,
        url: String,
        secrets: WebhookSecrets,
    },
    /// Sent once, to nobody who is known.
    Once {
        url: String,
        secret: Sealed,
    },
}

/// What is to be sent besides events of the ledger.
#[derive(Debug)]
pub struct NewDelivery {
    pub id: DeliveryId,
    pub event: EventId,
    pub kind: EventKind,
    pub subject: String,
    pub body: String,
    pub to: Addressee,
    pub created_at_ms: u64,
}

/// Who gets it.
#[derive(Debug)]
pub enum Addressee {
    Webhook(WebhookId),
    /// This URL, signed with this; the secret is sealed for the delivery. Those of one service are one receiver's.
    Once {
        service: ServiceId,
        url: String,
        secret: Sealed,
    },
}

/// A delivery that whoever has this may try now.
#[derive(Debug)]
pub struct DeliveryClaim {
    pub id: DeliveryId,
    pub event: EventId,
    pub body: String,
    pub target: Target,
    /// This attempt, from 1. Nobody else's.
    pub attempt: u32,
    pub expires_at_ms: u64,
}

/// How much is claimed, for how long.
#[derive(Debug, Clone, Copy)]
pub struct Claiming {
    pub now_ms: u64,
    pub lease_until_ms: u64,
    /// When what was never tried before is given up.
    pub expires_at_ms: u64,
    /// Under way at the same time to one webhook, on all nodes; and of the callbacks of one service.
    pub each: usize,
    /// At once.
    pub limit: usize,
}

/// How much is not over, of all nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutboxLength {
    /// Invocations.
    pub queued: u64,
    pub running: u64,
    pub deliveries: u64,
}

/// What stays in the outbox.
#[derive(Debug, Clone, Copy)]
pub struct OutboxBounds {
    /// What has expired fails.
    pub now_ms: u64,
    /// What is older and was never tried fails if its webhook is disabled.
    pub oldest_ms: u64,
    /// Of one webhook, and of the callbacks of one service, at most so many wait: the oldest fail.
    pub waiting: usize,
    /// So many of one webhook that were delivered or failed are remembered. Callbacks are not: nobody can see them.
    pub remembered: usize,
}

/// What came of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    Delivered,
    /// Not before then.
    Again {
        at_ms: u64,
    },
    Failed,
    /// Its webhook wants nothing any more.
    Disabled(DisabledReason),
}

#[async_trait]
pub trait WebhookLedger: Send + Sync + 'static {
    /// [`StoreError::Invalid`] if there are as many as there may be.
    async fn create_webhook(&self, webhook: &Webhook, secret: &Sealed) -> Result<(), StoreError>;
    async fn find_webhook(&self, id: &WebhookId) -> Result<Option<Webhook>, StoreError>;
    /// At most `limit` after this one, by id.
    async fn webhooks(
        &self,
        after: Option<&WebhookId>,
        limit: usize,
    ) -> Result<Vec<Webhook>, StoreError>;
    /// Replaces what is given; how it is then, if it is there.
    async fn update_webhook(
        &self,
        id: &WebhookId,
        changes: &UpdateWebhook,
    ) -> Result<Option<Webhook>, StoreError>;
    /// Gives it another secret; the present one is good until then, too. How it is then, if it is there.
    async fn rotate_webhook(
        &self,
        id: &WebhookId,
        secret: &Sealed,
        previous_until_ms: u64,
    ) -> Result<Option<Webhook>, StoreError>;
    /// Whether there was one. Its deliveries go with it.
    async fn erase_webhook(&self, id: &WebhookId) -> Result<bool, StoreError>;
}

#[async_trait]
pub trait DeliveryLedger: Send + Sync + 'static {
    async fn record_delivery(&self, delivery: &NewDelivery) -> Result<(), StoreError>;
    /// At most `limit` of a webhook before this place, newest first.
    async fn deliveries(
        &self,
        webhook: &WebhookId,
        before: Option<&Place<DeliveryId>>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError>;
    /// Makes a delivery of a webhook one that was never tried; how it is then, if it is there.
    async fn redeliver(
        &self,
        webhook: &WebhookId,
        id: &DeliveryId,
    ) -> Result<Option<Delivery>, StoreError>;
    /// When the next one is due that nobody tries: nothing if there is none.
    async fn next_delivery(&self) -> Result<Option<u64>, StoreError>;
    /// Takes what is due, for this node.
    async fn claim_deliveries(&self, claiming: &Claiming)
    -> Result<Vec<DeliveryClaim>, StoreError>;
    /// Says what came of it. Whether it was still its claim.
    async fn finish_delivery(
        &self,
        claim: &DeliveryClaim,
        attempt: &LastAttempt,
        next: &Next,
    ) -> Result<bool, StoreError>;
    /// Nobody of this node tries anything now: it has just started. Nothing is due later than `latest_ms`, which a
    /// clock that was ahead may have said.
    async fn release_deliveries(&self, latest_ms: u64) -> Result<(), StoreError>;
    async fn outbox_length(&self) -> Result<OutboxLength, StoreError>;
    async fn sweep_deliveries(&self, bounds: &OutboxBounds) -> Result<(), StoreError>;
}
