//! Invocations: recorded, run by whoever passes requests on, at least once, and settled.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::{chain, fault};
use torpor_protocol::event::Event;
use torpor_protocol::invocation::{
    ASYNC_HEADER, BODY_MAX, HEADERS_MAX, INVOCATION_HEADER, Invocation, InvocationAnswer,
    InvocationState, Invoke, RETRIES_MAX, TIMEOUT_MAX_MS,
};
use torpor_protocol::{ErrorCode, EventId, EventKind, InvocationId};
use torpor_store::{Addressee, ClaimedInvocation, InvocationBounds, NewDelivery, SealedCallback};

use super::hosted::Hosted;
use crate::Service;
use crate::error::{Error, Result};
use crate::{headers, hooks};

/// Invocations of one service that are not settled: each is a row of up to some megabytes.
const QUEUED: InvocationBounds = InvocationBounds { rows: 10_000, bytes: 256 << 20 };
/// Those of one service that run at the same time: one that is slow leaves places to others.
const EACH_MAX: usize = 16;
/// How long one that is settled is remembered, and how long a place is looked for.
const KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// Those of one service that are settled and remembered: each is a row of up to some megabytes, too.
const REMEMBERED: InvocationBounds = InvocationBounds { rows: 10_000, bytes: 256 << 20 };
/// Longest path, with its query: what most servers take.
const PATH_MAX: usize = 8 * 1024;
/// Bytes of the headers of a request, names and values: what most servers take.
const HEADER_BYTES_MAX: usize = 64 * 1024;
/// Bytes that a callback is told: what receivers take. The body of a longer answer has to be asked for.
const TOLD_MAX: usize = 256 * 1024;
/// First and longest pause before another attempt.
const BACKOFF_MS: (u64, u64) = (1000, 60_000);
/// How often it is looked for what is due when nothing rings: attempts that wait for their time.
pub const LOOK: Duration = Duration::from_secs(1);

/// Why there is no answer.
#[derive(Debug)]
pub enum Missed {
    /// No instance could take it: that costs no retry.
    NoPlace(String),
    Failed(String),
}

/// Records it; it is run soon after.
pub async fn invoke(app: &Service, hosted: &Hosted, request: Invoke) -> Result<Invocation> {
    check(&request)?;
    if let Some(tag) = &request.tag
        && !hosted.see(|known| known.row.traffic.iter().any(|it| it.tag.as_ref() == Some(tag)))
    {
        let message = format!("tag: service {} has no {tag}", hosted.name());
        return Err(Error::with_hint(
            ErrorCode::InvalidRequest,
            message,
            "`torpor service traffic` shows the tags",
        ));
    }
    let callback = request.callback.as_ref();
    let callback = callback.map(|it| hooks::callback(app, &it.url, &it.secret)).transpose()?;
    let now_ms = app.fleet.clock().now_ms();
    let invocation = Invocation {
        id: InvocationId::random(),
        state: InvocationState::Queued,
        method: request.method.clone(),
        path: request.path.clone(),
        failures: 0,
        message: None,
        answer: None,
        callback: callback.as_ref().map(|callback| callback.url.clone()),
        created_at_ms: now_ms,
        settled_at_ms: None,
    };
    let queued =
        app.ledger.queue_invocation(&hosted.id, &invocation, &request, callback.as_ref(), QUEUED);
    if !queued.await? {
        let InvocationBounds { rows, bytes } = QUEUED;
        let message = format!(
            "{rows} invocations of service {} wait already, or {bytes} bytes of them",
            hosted.name()
        );
        return Err(Error::with_hint(ErrorCode::CapacityReached, message, "ask again later"));
    }
    fault::point("invocation.recorded");
    app.hosting.queued.notify_one();
    Ok(invocation)
}

fn check(request: &Invoke) -> Result<()> {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if request.method.is_empty() || request.method.len() > 32 || !request.method.bytes().all(token)
    {
        return Err(Error::invalid("method: it is no method of HTTP"));
    }
    if request.path.len() > PATH_MAX {
        return Err(Error::invalid(format!("path: at most {PATH_MAX} bytes")));
    }
    if !request.path.starts_with('/') || !request.path.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::invalid("path: it begins with '/' and has no spaces"));
    }
    if request.headers.len() > HEADERS_MAX {
        return Err(Error::invalid(format!("headers: at most {HEADERS_MAX}")));
    }
    let bytes: usize = request.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    if bytes > HEADER_BYTES_MAX {
        return Err(Error::invalid(format!("headers: at most {HEADER_BYTES_MAX} bytes")));
    }
    for (name, value) in &request.headers {
        let Some(small) = headers::name_of(name).filter(|_| headers::is_value(value)) else {
            return Err(Error::invalid(format!("headers: {name:.80?} is no header")));
        };
        if !is_passed_on(&small) {
            return Err(Error::invalid(format!("headers: {name} is not passed on")));
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

/// Whether a header, in small letters, is the request's own: not about its way here, and not ours.
pub fn is_passed_on(name: &str) -> bool {
    ![ASYNC_HEADER, INVOCATION_HEADER].contains(&name) && !headers::TRAVEL_HEADERS.contains(&name)
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
        let now_ms = app.fleet.clock().now_ms();
        match app.ledger.claim_invocation(app.fleet.owner(), now_ms, EACH_MAX).await {
            Ok(Some(claimed)) => {
                fault::point("invocation.claimed");
                return claimed;
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "invocations not looked for"),
        }
        let _ = tokio::time::timeout(LOOK, queued).await;
    }
}

/// What came of an attempt.
pub async fn settle(
    app: &Service,
    mut claimed: ClaimedInvocation,
    ended: std::result::Result<InvocationAnswer, Missed>,
) {
    fault::point("invocation.answered");
    let now_ms = app.fleet.clock().now_ms();
    let again_at_ms = judge(&mut claimed, ended, now_ms);
    let callback = claimed.callback.take().filter(|_| again_at_ms.is_none());
    let callback = callback.map(|to| delivery(app, &claimed, to, now_ms));
    while let Err(error) =
        app.ledger.settle_invocation(&claimed, again_at_ms, callback.as_ref(), REMEMBERED).await
    {
        let error = chain(&error);
        tracing::error!(invocation = %claimed.invocation.id, error, "its end is not recorded yet");
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            // It is run again by the next daemon.
            () = app.stopping.cancelled() => return,
        }
    }
    fault::point("invocation.settled");
    if again_at_ms.is_none() {
        app.metrics.settled(claimed.invocation.state);
    }
    if callback.is_some() {
        app.events.hint();
    }
    // Another one of its service may run.
    app.hosting.queued.notify_one();
}

/// How it stands after an attempt; when it is due again, if it is.
fn judge(
    claimed: &mut ClaimedInvocation,
    ended: std::result::Result<InvocationAnswer, Missed>,
    now_ms: u64,
) -> Option<u64> {
    let pause =
        |times: u64| BACKOFF_MS.0.saturating_mul(1 << times.min(10)).min(BACKOFF_MS.1) + now_ms;
    let invocation = &mut claimed.invocation;
    let good = ended.as_ref().is_ok_and(|answer| answer.status < 500 && answer.status != 429);
    let (message, placed) = match &ended {
        Ok(_) if good => (None, true),
        Ok(answer) => (Some(format!("it was answered with {}", answer.status)), true),
        Err(Missed::Failed(why)) => (Some(why.clone()), true),
        Err(Missed::NoPlace(why)) => (Some(why.clone()), false),
    };
    let again_at_ms = if good {
        None
    } else if placed {
        invocation.failures += 1;
        let more = invocation.failures <= claimed.request.retries;
        more.then(|| pause(u64::from(invocation.failures - 1)))
    } else {
        (now_ms < invocation.created_at_ms.saturating_add(KEPT_MS)).then(|| pause(claimed.attempt))
    };
    (invocation.message, invocation.answer) = (message, ended.ok());
    invocation.state = match again_at_ms {
        Some(_) => InvocationState::Queued,
        None if good => InvocationState::Succeeded,
        None => InvocationState::Failed,
    };
    invocation.settled_at_ms = again_at_ms.is_none().then_some(now_ms);
    again_at_ms
}

/// What its callback is told.
fn delivery(
    app: &Service,
    claimed: &ClaimedInvocation,
    to: SealedCallback,
    now_ms: u64,
) -> NewDelivery {
    let service = app.hosting.by_id(&claimed.service).map(|hosted| hosted.name());
    let event = EventId::random();
    let kind = EventKind::InvocationFinished;
    let subject = claimed.invocation.id.to_string();
    let body = told(&claimed.invocation, |invocation| Event {
        id: event.clone(),
        sequence: 0,
        kind,
        at_ms: now_ms,
        subject: subject.clone(),
        data: serde_json::json!({"service": service, "invocation": invocation}),
    });
    let SealedCallback { delivery, url, secret } = to;
    let to = Addressee::Once { service: claimed.service.clone(), url, secret };
    NewDelivery { id: delivery, event, kind, subject, body, to, created_at_ms: now_ms }
}

/// With the answer, unless it is longer than a receiver takes: then without its body, and if need be its headers.
fn told(invocation: &Invocation, event: impl Fn(&Invocation) -> Event) -> String {
    let text = |invocation: &Invocation| {
        serde_json::to_string(&event(invocation)).expect("an event has text keys only")
    };
    let whole = text(invocation);
    if whole.len() <= TOLD_MAX {
        return whole;
    }
    let mut short = invocation.clone();
    if let Some(answer) = &mut short.answer {
        (answer.body, answer.base64, answer.truncated) = (String::new(), false, true);
    }
    let bodiless = text(&short);
    if bodiless.len() <= TOLD_MAX {
        return bodiless;
    }
    if let Some(answer) = &mut short.answer {
        answer.headers.clear();
    }
    text(&short)
}

/// What an earlier daemon worked on is due again. Before any is claimed: those of this daemon would be run twice.
pub async fn recover(app: &Service) {
    let latest_ms = app.fleet.clock().now_ms().saturating_add(BACKOFF_MS.1);
    while let Err(error) = app.ledger.release_invocations(app.fleet.owner(), latest_ms).await {
        tracing::warn!(error = chain(&error), "invocations not taken up, trying again");
        tokio::time::sleep(LOOK).await;
    }
}

pub(super) async fn prune(app: &Service) {
    let now_ms = app.fleet.clock().now_ms();
    if let Err(error) =
        app.ledger.prune_invocations(now_ms.saturating_sub(KEPT_MS), REMEMBERED).await
    {
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

/// At most `limit` before this place, newest first, without their answers.
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
            Invoke { path: format!("/{}", "a".repeat(PATH_MAX)), ..base() },
            Invoke { headers: [("a".to_owned(), "x".repeat(HEADER_BYTES_MAX))].into(), ..base() },
            Invoke { headers: [("a b".to_owned(), String::new())].into(), ..base() },
            Invoke { headers: [("a".to_owned(), "\r\n".to_owned())].into(), ..base() },
            Invoke { headers: [("Content-Length".to_owned(), "9".to_owned())].into(), ..base() },
            Invoke {
                headers: [("x-torpor-invocation".to_owned(), "x".to_owned())].into(),
                ..base()
            },
            Invoke { retries: RETRIES_MAX + 1, ..base() },
            Invoke { timeout_ms: 0, ..base() },
            Invoke { body: "%".into(), base64: true, ..base() },
            Invoke { body: long, ..base() },
        ] {
            assert!(check(&bad).is_err(), "{:.200}", format!("{bad:?}"));
        }
        check(&base()).unwrap();
    }

    fn claimed(failures: u32, attempt: u64) -> ClaimedInvocation {
        ClaimedInvocation {
            service: torpor_protocol::ServiceId::random(),
            attempt,
            invocation: Invocation {
                id: InvocationId::random(),
                state: InvocationState::Running,
                method: "POST".to_owned(),
                path: "/".to_owned(),
                failures,
                message: None,
                answer: None,
                callback: None,
                created_at_ms: 1000,
                settled_at_ms: None,
            },
            request: Invoke::default(),
            callback: None,
        }
    }

    fn answer(status: u16, body: &str) -> InvocationAnswer {
        let (headers, body) = (Default::default(), body.to_owned());
        InvocationAnswer { status, headers, body, base64: false, truncated: false }
    }

    #[test]
    fn an_attempt_that_found_no_place_costs_no_retry_and_is_given_up_after_a_day() {
        let full = || Err(Missed::NoPlace("all are busy".to_owned()));
        let mut last = claimed(2, 7);
        assert_eq!(judge(&mut last, full(), 2000), Some(2000 + BACKOFF_MS.1));
        assert_eq!((last.invocation.failures, last.invocation.state), (2, InvocationState::Queued));
        assert_eq!(judge(&mut claimed(0, 1), full(), 2000), Some(4000));
        assert_eq!(judge(&mut last, full(), 1000 + KEPT_MS), None);
        assert_eq!(last.invocation.state, InvocationState::Failed);
        let mut first = claimed(0, 1);
        assert_eq!(judge(&mut first, Ok(answer(429, "")), 2000), Some(3000));
        let slow = Err(Missed::Failed("no answer".to_owned()));
        assert_eq!(judge(&mut claimed(2, 3), slow, 2000), None);
        assert_eq!(judge(&mut claimed(2, 3), Ok(answer(404, "")), 2000), None);
    }

    #[test]
    fn a_callback_is_told_the_answer_unless_it_is_longer_than_receivers_take() {
        let event = |invocation: &Invocation| Event {
            id: EventId::random(),
            sequence: 0,
            kind: EventKind::InvocationFinished,
            at_ms: 5,
            subject: invocation.id.to_string(),
            data: serde_json::to_value(invocation).unwrap(),
        };
        let said = |body: &str| {
            let mut invocation = claimed(0, 1).invocation;
            invocation.answer = Some(answer(200, body));
            let text = told(&invocation, event);
            assert!(text.len() <= TOLD_MAX);
            let event: Event = serde_json::from_str(&text).unwrap();
            event.data["answer"].clone()
        };
        assert_eq!(
            (&said("well")["body"], &said("well")["truncated"]),
            (&"well".into(), &false.into())
        );
        let long = said(&"x".repeat(TOLD_MAX));
        assert_eq!((&long["body"], &long["truncated"]), (&"".into(), &true.into()));
        let mut invocation = claimed(0, 1).invocation;
        let headers = [("x-long".to_owned(), "x".repeat(TOLD_MAX))].into();
        invocation.answer = Some(InvocationAnswer { headers, ..answer(200, "well") });
        assert!(told(&invocation, event).len() <= TOLD_MAX);
    }

    #[test]
    fn a_body_is_text_if_it_can_be() {
        assert_eq!(text(b"caf\xc3\xa9".to_vec()), ("café".to_owned(), false));
        assert_eq!(text(vec![0xff]), ("/w==".to_owned(), true));
        let sent = Invoke { body: "/w==".into(), base64: true, ..Invoke::default() };
        assert_eq!(body(&sent).unwrap(), [0xff]);
    }
}
