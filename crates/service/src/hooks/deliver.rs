//! Sends what is in the outbox, as this node: claims what is due, tries it, says what came of it.
//!
//! - Nothing is in memory but what is being tried. A daemon that ends in the middle of an attempt leaves a claim,
//!   which the next one of its node takes up at once, and other nodes when its lease is over.
//! - A receiver gets a few requests at a time; one that is slow or gone holds up no other.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::Instant;
use torpor_egress::outgoing::Call;
use torpor_lifecycle::chain;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::event::LastAttempt;
use torpor_store::{Claiming, DeliveryClaim, OutboxBounds, Target, Vault, WebhookSecrets};

use super::sign::signature;
use super::verdict::{Answer, BACKOFF_MAX, Tried, Unsent, complaint};
use crate::Service;

/// Requests under way to one webhook; and of the callbacks of one service, which have one receiver as a rule.
const EACH_MAX: usize = 8;
/// Requests under way of this daemon.
const SENDING_MAX: usize = 64;
/// How long a receiver may take to answer: it should note what it got, and work later.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// What is read of an answer, so that its connection can be used again; nobody looks at it, and if it is not
/// read its connection ends and nothing else.
const BODY_MAX: usize = 16 * 1024;
const BODY_WAIT: Duration = Duration::from_secs(2);
/// How long nobody else tries what was claimed: more than an attempt takes, with names and connections.
const LEASE: Duration = Duration::from_secs(60);
/// How long something is tried.
const EXPIRES: Duration = Duration::from_secs(24 * 60 * 60);
/// How often the outbox is looked at without a hint.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is swept.
const SWEEP: Duration = Duration::from_secs(60);
/// Deliveries of one webhook, or callbacks of one service, that wait: then the oldest fail.
const WAITING_MAX: usize = 10_000;
/// Deliveries of one webhook that have ended and are remembered.
const REMEMBERED: usize = 1_000;

/// Sends until the daemon stops.
pub async fn deliver(service: Arc<Service>) {
    let latest_ms = after(service.fleet.clock().now_ms(), BACKOFF_MAX);
    while let Err(error) = service.ledger.release_deliveries(latest_ms).await {
        tracing::warn!(error = chain(&error), "cannot begin to deliver, trying again");
        tokio::time::sleep(LOOK).await;
    }
    let mut told = service.events.subscribe();
    // They end with the daemon: what they had is claimed anew.
    let mut sending = JoinSet::new();
    let mut swept = Instant::now();
    loop {
        told.mark_unchanged();
        while sending.try_join_next().is_some() {}
        let begun = match claim(&service, SENDING_MAX.saturating_sub(sending.len())).await {
            Ok(claims) => claims,
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot look for what is to be delivered");
                Vec::new()
            }
        };
        if begun.is_empty() {
            tokio::select! {
                changed = told.changed() => if changed.is_err() { return },
                () = service.events.outbox.notified() => {}
                Some(_) = sending.join_next() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
        for claim in begun {
            let service = Arc::clone(&service);
            sending.spawn(async move { attempt(&service, &claim).await });
        }
        if swept.elapsed() >= SWEEP {
            swept = Instant::now();
            let now_ms = service.fleet.clock().now_ms();
            let bounds = OutboxBounds {
                now_ms,
                oldest_ms: now_ms.saturating_sub(EXPIRES.as_millis() as u64),
                waiting: WAITING_MAX,
                remembered: REMEMBERED,
            };
            if let Err(error) = service.ledger.sweep_deliveries(&bounds).await {
                tracing::warn!(error = chain(&error), "cannot sweep the outbox");
            }
        }
    }
}

/// What is due, as far as there is room; nothing is written if nothing is.
async fn claim(service: &Service, limit: usize) -> Result<Vec<DeliveryClaim>, StoreError> {
    let now_ms = service.fleet.clock().now_ms();
    let due = service.ledger.next_delivery().await?;
    if limit == 0 || due.is_none_or(|due| due > now_ms) {
        return Ok(Vec::new());
    }
    let claiming = Claiming {
        now_ms,
        lease_until_ms: after(now_ms, LEASE),
        expires_at_ms: after(now_ms, EXPIRES),
        each: EACH_MAX,
        limit,
    };
    service.ledger.claim_deliveries(&claiming).await
}

fn after(now_ms: u64, wait: Duration) -> u64 {
    now_ms.saturating_add(wait.as_millis() as u64)
}

async fn attempt(service: &Service, claim: &DeliveryClaim) {
    let begun = Instant::now();
    let answer = send(service, claim).await;
    let now_ms = service.fleet.clock().now_ms();
    let tried = LastAttempt {
        at_ms: now_ms,
        status: answer.as_ref().ok().map(|answer| answer.status),
        error: complaint(&answer),
        took_ms: begun.elapsed().as_millis() as u64,
    };
    let DeliveryClaim { attempt, expires_at_ms, .. } = *claim;
    let next = Tried { answer: &answer, attempt, now_ms, expires_at_ms, chance: chance() }.next();
    tracing::debug!(delivery = %claim.id, attempt, ?next, error = tried.error, "delivery tried");
    service.metrics.tried(&next);
    // If that fails its lease ends, and it is tried again.
    if let Err(error) = service.ledger.finish_delivery(claim, &tried, &next).await {
        tracing::warn!(delivery = %claim.id, error = chain(&error), "what came of a delivery is not recorded");
    }
}

/// The status alone says whether it was delivered.
async fn send(service: &Service, claim: &DeliveryClaim) -> Result<Answer, Unsent> {
    let now_ms = service.fleet.clock().now_ms();
    let unsigned = |error: StoreError| Unsent::Unsigned(chain(&error));
    let (url, keys) = match &claim.target {
        Target::Webhook { id, url, secrets } => {
            (url, keys(&service.vault, id.as_str(), secrets, now_ms).map_err(unsigned)?)
        }
        Target::Once { url, secret } => {
            let key = service.vault.webhook_key(claim.id.as_str(), secret).map_err(unsigned)?;
            (url, vec![key])
        }
    };
    let (id, at_secs) = (claim.event.as_str(), wall_secs());
    let (signature, stamp) = (signature(&keys, id, at_secs, &claim.body), at_secs.to_string());
    let call = Call {
        method: "POST",
        url,
        headers: &[
            ("content-type", "application/json"),
            ("webhook-id", id),
            ("webhook-timestamp", &stamp),
            ("webhook-signature", &signature),
        ],
        body: Bytes::from(claim.body.clone()),
        within: ANSWER_MAX,
        answer_max: BODY_MAX,
        answer_within: BODY_WAIT,
    };
    let answer = service.egress.outgoing().call(call).await?;
    let retry_after = answer.header("retry-after").map(str::to_owned);
    Ok(Answer { status: answer.status, retry_after })
}

/// What the clock says now. Receivers refuse what is minutes old, and the lifecycle's clock does not follow one that
/// was stepped, or a host that slept.
fn wall_secs() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The present key, and the one before as long as that is good and can be opened.
fn keys(
    vault: &Vault,
    id: &str,
    secrets: &WebhookSecrets,
    now_ms: u64,
) -> Result<Vec<Vec<u8>>, StoreError> {
    let mut keys = vec![vault.webhook_key(id, &secrets.present)?];
    let previous = secrets.previous.as_ref().filter(|(_, until_ms)| *until_ms > now_ms);
    keys.extend(previous.and_then(|(sealed, _)| vault.webhook_key(id, sealed).ok()));
    Ok(keys)
}

/// From 0 to 1.
fn chance() -> f64 {
    let mut bytes = [0; 4];
    // Without entropy all wait for the longest time.
    match getrandom::fill(&mut bytes) {
        Ok(()) => f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX),
        Err(_) => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use torpor_store::{Layout, Ledger};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_signature_has_the_time_of_the_wall_clock_whatever_the_lifecycle_has_for_it() {
        let clock = torpor_lifecycle::Clock::start();
        tokio::time::advance(Duration::from_secs(3600)).await;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!(wall_secs().abs_diff(now) <= 1);
        assert!(wall_secs().abs_diff(clock.now_ms() / 1000) > 3000);
    }

    /// What the hint of a secret that can't be opened says to do, helps.
    #[tokio::test]
    async fn a_new_secret_signs_although_the_one_before_can_not_be_opened() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::open(dir.path()).unwrap();
        let ledger = Ledger::open(&layout).await.unwrap();
        let vault =
            |digit: &str| Vault::open(ledger.clone(), &layout, Some(&digit.repeat(64))).unwrap();
        let (_, lost) = vault("1").make_webhook_secret("hook").unwrap();
        let (_, old) = vault("2").make_webhook_secret("hook").unwrap();
        let (_, present) = vault("2").make_webhook_secret("hook").unwrap();
        let signing = |present, previous, now_ms| {
            let secrets = WebhookSecrets { present, previous: Some((previous, 10)) };
            keys(&vault("2"), "hook", &secrets, now_ms).map(|keys| keys.len())
        };
        let copy = |sealed: &torpor_store::Sealed| torpor_store::Sealed {
            nonce: sealed.nonce.clone(),
            bytes: sealed.bytes.clone(),
        };
        assert_eq!(signing(copy(&present), copy(&old), 9).unwrap(), 2);
        assert_eq!(signing(copy(&present), copy(&old), 10).unwrap(), 1);
        assert_eq!(signing(copy(&present), copy(&lost), 9).unwrap(), 1);
        assert!(signing(lost, present, 9).is_err());
    }
}
