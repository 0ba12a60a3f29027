//! Invocations: recorded, run by whoever passes requests on, at least once, and settled.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use torpor_lifecycle::ledger::Place;
use torpor_protocol::invocation::{
    BODY_MAX, HEADERS_MAX, Invocation, InvocationAnswer, InvocationState, Invoke, RETRIES_MAX,
    TIMEOUT_MAX_MS,
};
use torpor_protocol::{ErrorCode, InvocationId};
use torpor_store::ClaimedInvocation;

use super::hosted::Hosted;
use crate::Service;
use crate::error::{Error, Result};

/// Invocations of one service that are not settled: each is a row of up to a megabyte.
const QUEUED_MAX: usize = 10_000;
/// How long one that is settled is remembered.
const KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// First and longest pause before another attempt.
const BACKOFF_MS: (u64, u64) = (1000, 60_000);
/// How often it is looked for what is due when nothing rings: attempts that wait for their time.
pub const LOOK: Duration = Duration::from_secs(1);

/// Records it; it is run soon after.
pub async fn invoke(app: &Service, hosted: &Hosted, request: Invoke) -> Result<Invocation> {
    check(&request)?;
    let now_ms = app.fleet.clock().now_ms();
    let invocation = Invocation {
        id: InvocationId::random(),
        state: InvocationState::Queued,
        method: request.method.clone(),
        path: request.path.clone(),
        failures: 0,
        message: None,
        answer: None,
        created_at_ms: now_ms,
        settled_at_ms: None,
    };
    if !app.ledger.queue_invocation(&hosted.id, &invocation, &request, QUEUED_MAX).await? {
        let message = format!("{QUEUED_MAX} invocations of service {} wait already", hosted.name());
        return Err(Error::with_hint(ErrorCode::CapacityReached, message, "ask again later"));
    }
    app.hosting.queued.notify_one();
    Ok(invocation)
}

fn check(request: &Invoke) -> Result<()> {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if request.method.is_empty() || request.method.len() > 32 || !request.method.bytes().all(token)
    {
        return Err(Error::invalid("method: it is no method of HTTP"));
    }
    if !request.path.starts_with('/') || !request.path.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::invalid("path: it begins with '/' and has no spaces"));
    }
    if request.headers.len() > HEADERS_MAX {
        return Err(Error::invalid(format!("headers: at most {HEADERS_MAX}")));
    }
    for (name, value) in &request.headers {
        if crate::headers::name_of(name).is_none() || !crate::headers::is_value(value) {
            return Err(Error::invalid(format!("headers: {name:.80?} is no header")));
        }
    }
    if request.retries > RETRIES_MAX || !(1..=TIMEOUT_MAX_MS).contains(&request.timeout_ms) {
        return Err(Error::invalid(format!(
            "retries is at most {RETRIES_MAX}, and timeout_ms from 1 to {TIMEOUT_MAX_MS}"
        )));
    }
    let bytes = body(request)?;
    if bytes.len() > BODY_MAX {
        let message = format!("body: at most {BODY_MAX} bytes");
        return Err(Error::new(ErrorCode::TooLarge, message));
    }
    Ok(())
}

/// What is sent.
pub fn body(request: &Invoke) -> Result<Vec<u8>> {
    if !request.base64 {
        return Ok(request.body.clone().into_bytes());
    }
    STANDARD.decode(&request.body).map_err(|error| Error::invalid(format!("body: {error}")))
}

/// Bytes as a body has them: text if they are, else base64.
pub fn text(bytes: Vec<u8>) -> (String, bool) {
    match String::from_utf8(bytes) {
        Ok(text) => (text, false),
        Err(error) => (STANDARD.encode(error.as_bytes()), true),
    }
}

/// The next one that is due, waiting for it.
pub async fn next(app: &Arc<Service>) -> ClaimedInvocation {
    loop {
        let queued = app.hosting.queued.notified();
        match app.ledger.claim_invocation(app.fleet.owner(), app.fleet.clock().now_ms()).await {
            Ok(Some(claimed)) => return claimed,
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "invocations not looked for"),
        }
        let _ = tokio::time::timeout(LOOK, queued).await;
    }
}

/// What came of an attempt; `Err`: why there was no answer.
pub async fn settle(
    app: &Service,
    mut claimed: ClaimedInvocation,
    ended: std::result::Result<InvocationAnswer, String>,
) {
    let now_ms = app.fleet.clock().now_ms();
    let invocation = &mut claimed.invocation;
    let (good, message) = match &ended {
        Ok(answer) => {
            let good = answer.status < 500 && answer.status != 429;
            (good, (!good).then(|| format!("it was answered with {}", answer.status)))
        }
        Err(why) => (false, Some(why.clone())),
    };
    (invocation.message, invocation.answer) = (message, ended.ok());
    let mut again_at_ms = None;
    if good {
        invocation.state = InvocationState::Succeeded;
    } else {
        let pause = BACKOFF_MS.0.saturating_mul(1 << invocation.failures.min(10)).min(BACKOFF_MS.1);
        invocation.failures += 1;
        invocation.state = if invocation.failures <= claimed.request.retries {
            again_at_ms = Some(now_ms + pause);
            InvocationState::Queued
        } else {
            InvocationState::Failed
        };
    }
    invocation.settled_at_ms = invocation.state.is_settled().then_some(now_ms);
    if let Err(error) = app.ledger.settle_invocation(&claimed, again_at_ms).await {
        // It is run again by the next daemon.
        tracing::error!(invocation = %claimed.invocation.id, %error, "its end was not recorded");
    }
}

/// What an earlier daemon worked on is due again, and what is old is forgotten.
pub(super) async fn recover(app: &Service) {
    let now_ms = app.fleet.clock().now_ms();
    let recovered = app.ledger.release_invocations(app.fleet.owner()).await;
    let pruned = app.ledger.prune_invocations(now_ms.saturating_sub(KEPT_MS)).await;
    if let Err(error) = recovered.and(pruned) {
        tracing::warn!(%error, "invocations not taken up");
    }
}

pub(super) async fn prune(app: &Service) {
    let now_ms = app.fleet.clock().now_ms();
    if let Err(error) = app.ledger.prune_invocations(now_ms.saturating_sub(KEPT_MS)).await {
        tracing::warn!(%error, "old invocations not forgotten");
    }
}

pub async fn find_invocation(
    app: &Service,
    hosted: &Hosted,
    id: &InvocationId,
) -> Result<Invocation> {
    let found = app.ledger.find_invocation(&hosted.id, id).await?;
    found.ok_or_else(|| {
        let message =
            format!("service {} has no invocation {id}, or had it long ago", hosted.name());
        Error::new(ErrorCode::NotFound, message)
    })
}

/// At most `limit` before this place, newest first.
pub async fn invocations(
    app: &Service,
    hosted: &Hosted,
    before: Option<&Place<InvocationId>>,
    limit: usize,
) -> Result<Vec<Invocation>> {
    Ok(app.ledger.invocations(&hosted.id, before, limit).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_request_is_refused_before_it_is_recorded() {
        let base = Invoke::default;
        let long = "x".repeat(BODY_MAX + 1);
        for bad in [
            Invoke { method: "A B".into(), ..base() },
            Invoke { path: "x".into(), ..base() },
            Invoke { path: "/a b".into(), ..base() },
            Invoke { headers: [("a b".to_owned(), String::new())].into(), ..base() },
            Invoke { headers: [("a".to_owned(), "\r\n".to_owned())].into(), ..base() },
            Invoke { retries: RETRIES_MAX + 1, ..base() },
            Invoke { timeout_ms: 0, ..base() },
            Invoke { body: "%".into(), base64: true, ..base() },
            Invoke { body: long, ..base() },
        ] {
            assert!(check(&bad).is_err(), "{:.200}", format!("{bad:?}"));
        }
        check(&base()).unwrap();
    }

    #[test]
    fn a_body_is_text_if_it_can_be() {
        assert_eq!(text(b"caf\xc3\xa9".to_vec()), ("café".to_owned(), false));
        assert_eq!(text(vec![0xff]), ("/w==".to_owned(), true));
        let sent = Invoke { body: "/w==".into(), base64: true, ..Invoke::default() };
        assert_eq!(body(&sent).unwrap(), [0xff]);
    }
}
