//! An HTTP API as tools, from its OpenAPI document (3.0 and 3.1), without a process.
//!
//! - Requests go to the URL that the operator gave; what the document says about servers is no permission.
//! - Parameters are nested by their place (`path`, `query`, `header`, `body`), so that no two clash.
//! - Only what an operation declares is sent, by the document that was listed: see [`Read`].

mod convert;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use hyper::http::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::{Method, Request, Uri};
use parking_lot::Mutex;
use serde_json::{Value, json};
use torpor_egress::outgoing;
use torpor_protocol::mcp_gateway::McpOpenapiServer;
use torpor_service::{Error, Result, Service};

use super::{Bounds, LIST_WITHIN, UpstreamError, http, secrets};
use crate::canonical;
use crate::pins::Listing;
use crate::policy::glob;
use convert::Operation;

/// Bytes of a document that is read from a URL.
const DOCUMENT_MAX: usize = 8 << 20;

pub(super) struct Openapi {
    service: Arc<Service>,
    spec: McpOpenapiServer,
    read: Mutex<Read>,
    generation: Arc<AtomicU64>,
}

/// The document as it was last read. Another one is of another generation: what was compared with what is
/// approved is what is called.
#[derive(Default)]
struct Read {
    digest: Option<String>,
    operations: Arc<HashMap<String, Operation>>,
}

pub(super) fn check(service: &Service, spec: &McpOpenapiServer) -> Result<()> {
    let check = |field: &str, url: &str| {
        let checked = service.egress.outgoing().check(url);
        checked.map(drop).map_err(|error| Error::invalid(format!("{field}: {error}")))
    };
    check("url", &spec.url)?;
    http::check_headers(&spec.headers)?;
    match (&spec.document, &spec.document_url) {
        (Some(document), None) => convert::operations(document, |name| is_wanted(spec, name))
            .map(drop)
            .map_err(|why| Error::invalid(format!("document: {why}"))),
        (None, Some(url)) => check("document_url", url),
        (Some(_), Some(_)) | (None, None) => {
            Err(Error::invalid("either document or document_url says what the API is"))
        }
    }
}

fn is_wanted(spec: &McpOpenapiServer, name: &str) -> bool {
    spec.operations.is_empty() || spec.operations.iter().any(|pattern| glob(pattern, name))
}

impl Openapi {
    pub(super) fn new(
        service: &Arc<Service>,
        spec: McpOpenapiServer,
        generation: Arc<AtomicU64>,
    ) -> Self {
        Self { service: Arc::clone(service), spec, read: Mutex::default(), generation }
    }

    pub(super) async fn list(&self) -> std::result::Result<Listing, UpstreamError> {
        let document = match &self.spec.document {
            Some(document) => document.clone(),
            None => self.fetch().await?,
        };
        let operations = convert::operations(&document, |name| is_wanted(&self.spec, name))
            .map_err(UpstreamError::BadAnswer)?;
        let operations: HashMap<_, _> =
            operations.into_iter().map(|operation| (operation.name.clone(), operation)).collect();
        let tools = operations.values().map(Operation::tool).collect();
        let info = &document["info"];
        let digest = Some(canonical::digest(&document));
        {
            let mut read = self.read.lock();
            if read.digest.is_some() && read.digest != digest {
                self.generation.fetch_add(1, Ordering::AcqRel);
            }
            *read = Read { digest, operations: Arc::new(operations) };
        }
        Ok(Listing {
            identity: json!({ "name": info["title"], "version": info["version"] }),
            tools,
            ..Listing::default()
        })
    }

    async fn fetch(&self) -> std::result::Result<Value, UpstreamError> {
        let url = self.spec.document_url.clone().unwrap_or_default();
        let wrong = |why: &str| UpstreamError::BadAnswer(format!("its OpenAPI document {why}"));
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = url.parse().map_err(|_| wrong("has no proper URL"))?;
        let outgoing = self.service.egress.outgoing();
        let response = outgoing.send(request, LIST_WITHIN).await.map_err(http::unsent)?;
        if !response.status().is_success() {
            return Err(wrong(&format!(
                "can't be read: HTTP status {}",
                response.status().as_u16()
            )));
        }
        let body = outgoing::whole(&url, response.into_body(), DOCUMENT_MAX, LIST_WITHIN).await;
        serde_json::from_slice(&body.map_err(http::unsent)?).map_err(|_| wrong("is no JSON"))
    }

    pub(super) async fn call(
        &self,
        params: &Value,
        bounds: Bounds,
        generation: Option<u64>,
    ) -> std::result::Result<Value, UpstreamError> {
        let operations = {
            let read = self.read.lock();
            if generation.is_some_and(|wanted| wanted != self.generation.load(Ordering::Acquire)) {
                return Err(UpstreamError::Reconnected);
            }
            Arc::clone(&read.operations)
        };
        let name = params["name"].as_str().unwrap_or_default();
        let Some(operation) = operations.get(name) else {
            return Err(UpstreamError::BadAnswer(format!("the API has no operation {name}")));
        };
        let request = match self.request(operation, &params["arguments"]).await {
            Ok(request) => request,
            Err(Unfit::Arguments(why)) => return Ok(told(&why, None, true)),
            Err(Unfit::Ours(error)) => return Err(error),
        };
        let response = self
            .service
            .egress
            .outgoing()
            .send(request, bounds.within)
            .await
            .map_err(http::unsent)?;
        let status = response.status();
        if status.is_redirection() {
            return Err(UpstreamError::Unreachable(format!(
                "the API answered with a redirect ({}), which is not followed",
                status.as_u16()
            )));
        }
        let body =
            outgoing::whole(&self.spec.url, response.into_body(), bounds.bytes, bounds.within)
                .await;
        let body = body.map_err(http::unsent)?;
        let parsed = serde_json::from_slice::<Value>(&body).ok();
        let mut text = String::from_utf8_lossy(&body).into_owned();
        if !status.is_success() {
            text = format!("HTTP status {}\n{text}", status.as_u16());
        }
        Ok(told(&text, parsed.filter(Value::is_object), !status.is_success()))
    }

    async fn request(
        &self,
        operation: &Operation,
        arguments: &Value,
    ) -> std::result::Result<Request<Bytes>, Unfit> {
        let url =
            format!("{}{}", self.spec.url.trim_end_matches('/'), operation.target(arguments)?);
        let uri: Uri = url
            .parse()
            .map_err(|_| Unfit::Arguments("the arguments make no proper URL".to_owned()))?;
        let body = arguments.get("body").filter(|body| operation.has_body && !body.is_null());
        let mut request =
            Request::new(body.map(|body| Bytes::from(body.to_string())).unwrap_or_default());
        *request.method_mut() =
            Method::from_bytes(operation.method.as_bytes()).unwrap_or(Method::GET);
        let headers = request.headers_mut();
        headers
            .insert(ACCEPT, HeaderValue::from_static("application/json, text/*;q=0.9, */*;q=0.1"));
        if body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        for name in operation.parameters("header") {
            let Some(value) = arguments["header"].get(name).filter(|value| !value.is_null()) else {
                continue;
            };
            let bad = || Unfit::Arguments(format!("header.{name} can't be sent"));
            let name = HeaderName::try_from(name).map_err(|_| bad())?;
            headers.insert(name, HeaderValue::try_from(plain(value)).map_err(|_| bad())?);
        }
        // Last: no argument replaces what the operator says.
        for (name, text) in &self.spec.headers {
            let value = secrets::revealed(&self.service, text, &uri).await.map_err(Unfit::Ours)?;
            let ours = || {
                Unfit::Ours(UpstreamError::Unreachable(format!("the header {name} can't be sent")))
            };
            let value = HeaderValue::try_from(value).map_err(|_| ours())?;
            request.headers_mut().insert(HeaderName::try_from(name).map_err(|_| ours())?, value);
        }
        *request.uri_mut() = uri;
        Ok(request)
    }
}

/// Why a request can't be made.
enum Unfit {
    Arguments(String),
    Ours(UpstreamError),
}

impl Operation {
    /// Path and query for these arguments.
    fn target(&self, arguments: &Value) -> std::result::Result<String, Unfit> {
        let mut path = self.path.clone();
        for name in self.parameters("path") {
            let value = arguments["path"].get(name).filter(|value| !value.is_null());
            let value = value.ok_or_else(|| Unfit::Arguments(format!("path.{name} is missing")))?;
            let value = encoded(&plain(value));
            // As a whole segment it would lead elsewhere.
            if value.is_empty() || value == "." || value == ".." {
                return Err(Unfit::Arguments(format!("path.{name} can't be empty or dots")));
            }
            path = path.replace(&format!("{{{name}}}"), &value);
        }
        let mut sign = '?';
        for name in self.parameters("query") {
            let values = match arguments["query"].get(name) {
                None | Some(Value::Null) => continue,
                Some(Value::Array(values)) => values.clone(),
                Some(value) => vec![value.clone()],
            };
            for value in values {
                let _ = write!(path, "{sign}{}={}", encoded(name), encoded(&plain(&value)));
                sign = '&';
            }
        }
        Ok(path)
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            value.to_string()
        }
    }
}

/// Percent-encoded, all but what is never special.
pub(super) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

fn told(text: &str, structured: Option<Value>, is_error: bool) -> Value {
    let mut result = json!({ "content": [{ "type": "text", "text": text }], "isError": is_error });
    if let Some(structured) = structured {
        result["structuredContent"] = structured;
    }
    result
}
