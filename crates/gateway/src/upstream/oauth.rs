//! Tokens by OAuth 2.1 client credentials: asked for when needed, kept until shortly before they end.

use std::time::Duration;

use bytes::Bytes;
use hyper::http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use hyper::http::{Method, Request, Uri};
use serde::Deserialize;
use tokio::sync::Mutex;
use tokio::time::Instant;
use torpor_egress::outgoing;
use torpor_protocol::mcp_gateway::McpOauth;
use torpor_service::Service;

use super::openapi::encoded;
use super::{UpstreamError, http, secrets};

const WITHIN: Duration = Duration::from_secs(15);
const ANSWER_MAX: usize = 64 * 1024;
/// A token that ends so soon is asked for anew; one whose end is not said is used so long, and none longer
/// than this, whatever its server says.
const EARLY: Duration = Duration::from_secs(30);
const UNSAID: u64 = 300;
const LASTS_MAX: u64 = 86_400;

pub(super) struct Tokens {
    spec: Option<McpOauth>,
    /// What the tokens are for (RFC 8707): they are of no use to another server.
    resource: String,
    held: Mutex<Option<(String, Instant)>>,
}

#[derive(Deserialize)]
struct Granted {
    access_token: String,
    expires_in: Option<u64>,
}

impl Tokens {
    pub(super) fn new(spec: Option<McpOauth>, resource: String) -> Self {
        Self { spec, resource, held: Mutex::default() }
    }

    /// The token, if there is one to be sent.
    pub(super) async fn get(&self, service: &Service) -> Result<Option<String>, UpstreamError> {
        let Some(spec) = &self.spec else { return Ok(None) };
        let mut held = self.held.lock().await;
        if let Some((token, until)) = &*held
            && *until > Instant::now()
        {
            return Ok(Some(token.clone()));
        }
        let granted = ask(service, spec, &self.resource).await?;
        let lasts = Duration::from_secs(granted.expires_in.unwrap_or(UNSAID).min(LASTS_MAX));
        *held = Some((granted.access_token.clone(), Instant::now() + lasts.saturating_sub(EARLY)));
        Ok(Some(granted.access_token))
    }

    /// It was refused. Whether there was one.
    pub(super) async fn forget(&self) -> bool {
        self.held.lock().await.take().is_some()
    }
}

async fn ask(service: &Service, spec: &McpOauth, resource: &str) -> Result<Granted, UpstreamError> {
    let wrong = |why: &str| UpstreamError::Unreachable(format!("no token: {why}"));
    let uri: Uri = spec.token_url.parse().map_err(|_| wrong("its URL is none"))?;
    let secret = secrets::revealed(service, &spec.client_secret, &uri).await?;
    let mut form = vec![
        ("grant_type", "client_credentials".to_owned()),
        ("client_id", spec.client_id.clone()),
        ("client_secret", secret),
        ("resource", resource.to_owned()),
    ];
    form.extend(spec.scope.clone().map(|scope| ("scope", scope)));
    let form: Vec<_> =
        form.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
    let mut request = Request::new(Bytes::from(form.join("&")));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri;
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    let response = service.egress.outgoing().send(request, WITHIN).await.map_err(http::unsent)?;
    if !response.status().is_success() {
        return Err(wrong(&format!(
            "its server answered with HTTP status {}",
            response.status().as_u16()
        )));
    }
    let body = outgoing::whole(&spec.token_url, response.into_body(), ANSWER_MAX, WITHIN).await;
    let body = body.map_err(http::unsent)?;
    serde_json::from_slice(&body).map_err(|_| wrong("its server gave none"))
}
