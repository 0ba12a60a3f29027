//! Invocations of services: taken from requests, and run like requests, without anybody who waits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, COOKIE, HOST};
use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use torpor_protocol::ErrorCode;
use torpor_protocol::Name;
use torpor_protocol::hosting::MAIN_PREVIEW;
use torpor_protocol::invocation::{
    ASYNC_HEADER, BODY_MAX, INVOCATION_HEADER, InvocationAnswer, Invoke,
};
use torpor_proxy::{Destination, Manner, NotListening, Proxy};
use torpor_service::hosting::invocations::Missed;
use torpor_service::hosting::{self, Hosted, invocations};
use torpor_service::{Error, Service};
use torpor_store::ClaimedInvocation;

use super::page::ErrorPage;
use super::visit::Instead;
use super::{PreviewServer, instance};

/// Invocations that run at the same time: each is a request and its answer in memory, some megabytes at most.
const RUNNING_MAX: usize = 64;
/// How long one keeps its place while it waits for an instance, if all places are taken: it is put back, which costs
/// no retry, and those of other services run.
const WAIT_IN_PLACE: Duration = Duration::from_secs(1);
/// How long a body of an invocation may take to arrive.
const ARRIVES: Duration = Duration::from_secs(60);
/// Whether a request wants no answer now.
pub(super) fn is_asynchronous(headers: &HeaderMap) -> bool {
    headers.get(ASYNC_HEADER).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"))
}

/// Records a request, and answers with its id. `preview`: by which address it came.
pub(super) async fn accept(
    service: &Service,
    hosted: &Hosted,
    preview: &Name,
    request: Request<Incoming>,
) -> Instead<Response<Body>> {
    let refuse = |error: &Error| ErrorPage::of(error);
    let (head, body) = request.into_parts();
    let body = timeout(ARRIVES, Limited::new(body, BODY_MAX).collect()).await;
    let body = body
        .map_err(|_| refuse(&Error::new(ErrorCode::Timeout, "the body did not arrive in time")))?;
    let too_large = |_| {
        let message = format!("the body of an invocation has at most {BODY_MAX} bytes");
        refuse(&Error::new(ErrorCode::TooLarge, message))
    };
    let body = body.map_err(too_large)?.to_bytes();
    let (body, base64) = invocations::text(body.into());
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let wish = Invoke {
        method: head.method.to_string(),
        path,
        headers: joined(&head.headers),
        body,
        base64,
        tag: Some(preview.clone()).filter(|name| name.as_str() != MAIN_PREVIEW),
        ..Invoke::default()
    };
    let invocation =
        invocations::invoke(service, hosted, wish).await.map_err(|error| refuse(&error))?;
    let text = serde_json::to_string(&invocation).expect("an invocation has text keys only");
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = StatusCode::ACCEPTED;
    let json = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    Ok(response)
}

/// Those that are passed on. What was sent in several fields of one name is one, as HTTP has it.
fn joined(headers: &HeaderMap) -> BTreeMap<String, String> {
    let names = headers.keys().filter(|name| invocations::is_passed_on(name.as_str()));
    let field = |name: &HeaderName| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        let values: Vec<_> = values.collect();
        let between = if *name == COOKIE { "; " } else { ", " };
        (!values.is_empty()).then(|| (name.as_str().to_owned(), values.join(between)))
    };
    names.filter_map(field).collect()
}

impl PreviewServer {
    /// Runs invocations until the daemon stops.
    pub async fn run_invocations(self: Arc<Self>) {
        invocations::recover(&self.service).await;
        let places = Arc::new(Semaphore::new(RUNNING_MAX));
        loop {
            let place = Arc::clone(&places).acquire_owned().await;
            let place = place.expect("the semaphore is never closed");
            let claimed = invocations::next(&self.service).await;
            let (server, places) = (Arc::clone(&self), Arc::clone(&places));
            let tasks = self.service.tasks.clone();
            tasks.spawn(async move {
                let _place = place;
                let ended = tokio::select! {
                    ended = attempt(&server.service, &server.proxy, &claimed, &places) => ended,
                    // The next daemon runs it again.
                    () = server.service.stopping.cancelled() => return,
                };
                invocations::settle(&server.service, claimed, ended).await;
            });
        }
    }
}

async fn attempt(
    service: &Arc<Service>,
    proxy: &Proxy,
    claimed: &ClaimedInvocation,
    places: &Semaphore,
) -> Result<InvocationAnswer, Missed> {
    let no_place = |why: &str| Missed::NoPlace(why.to_owned());
    let hosted = service.hosting.by_id(&claimed.service).ok_or(no_place("the service is gone"))?;
    let mut request = request(claimed).map_err(Missed::Failed)?;
    let main = || MAIN_PREVIEW.parse().expect("it is a name");
    let preview = claimed.request.tag.clone().unwrap_or_else(main);
    let entered = tokio::select! {
        entered = instance::enter(service, &hosted, &preview, &mut request) => entered,
        () = wanted(places) => return Err(no_place("no instance had room")),
    };
    let (to, revision) = entered.map_err(|page| no_place(&page.body.message))?;
    let sandbox = to.sandbox.id().clone();
    let limit = Duration::from_millis(claimed.request.timeout_ms);
    let asked = timeout(limit, ask(proxy, to, request)).await;
    match asked.unwrap_or_else(|_| Err(format!("no answer within {limit:?}"))) {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => {
            if let Some(revision) = revision {
                hosting::report_unhealthy(service, &hosted, revision, &sandbox);
            }
            Err(no_place("nothing listened in the instance"))
        }
        Err(why) => Err(Missed::Failed(why)),
    }
}

/// When somebody else might have a use for a place.
async fn wanted(places: &Semaphore) {
    loop {
        tokio::time::sleep(WAIT_IN_PLACE).await;
        if places.available_permits() == 0 {
            return;
        }
    }
}

/// The answer; none if nothing listens.
async fn ask(
    proxy: &Proxy,
    to: Destination,
    request: Request<Full<Bytes>>,
) -> Result<Option<InvocationAnswer>, String> {
    let response = proxy.handle(to, request, None, Manner::default()).await;
    if response.extensions().get::<NotListening>().is_some() {
        return Ok(None);
    }
    let (head, body) = response.into_parts();
    let (bytes, truncated) = kept(body).await?;
    let headers = head.headers.iter().filter_map(|(name, value)| {
        Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
    });
    let (body, base64) = invocations::text(bytes);
    let status = head.status.as_u16();
    Ok(Some(InvocationAnswer { status, headers: headers.collect(), body, base64, truncated }))
}

fn request(claimed: &ClaimedInvocation) -> Result<Request<Full<Bytes>>, String> {
    let wish = &claimed.request;
    let bytes = invocations::body(wish).map_err(|error| error.to_string())?;
    let method = Method::from_bytes(wish.method.as_bytes()).map_err(|error| error.to_string())?;
    let mut request = Request::builder().method(method).uri(&wish.path).header(HOST, "localhost");
    for (name, value) in &wish.headers {
        request = request.header(name, value);
    }
    let request = request.header(INVOCATION_HEADER, claimed.invocation.id.as_str());
    request.body(Full::from(bytes)).map_err(|error| error.to_string())
}

/// The beginning of a body, and whether there was more.
async fn kept(mut body: torpor_proxy::Body) -> Result<(Vec<u8>, bool), String> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| format!("the answer broke off: {error}"))?;
        let Ok(data) = frame.into_data() else { continue };
        let room = BODY_MAX - bytes.len();
        bytes.extend_from_slice(&data[..data.len().min(room)]);
        if data.len() > room {
            return Ok((bytes, true));
        }
    }
    Ok((bytes, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_were_sent_in_several_fields_are_kept_whole() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("cookie", "a=1"),
            ("cookie", "b=2; c=3"),
            ("accept", "text/html"),
            ("accept", "*/*"),
            ("x-torpor-async", "true"),
            ("x-torpor-invocation", "inv-of-somebody"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        let joined = joined(&headers);
        assert_eq!(joined["cookie"], "a=1; b=2; c=3");
        assert_eq!(joined["accept"], "text/html, */*");
        assert_eq!(joined.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_an_instance_gives_up_its_place_only_if_all_are_taken() {
        let places = Semaphore::new(1);
        let soon = WAIT_IN_PLACE * 10;
        assert!(timeout(soon, wanted(&places)).await.is_err(), "nobody wants it");
        let _taken = places.acquire().await.unwrap();
        timeout(soon, wanted(&places)).await.unwrap();
    }
}
