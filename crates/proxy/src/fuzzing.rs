//! Entry point of a fuzz target: what holds whatever a visitor of a preview sends.

#[path = "../../../fuzz/input.rs"]
mod input;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Uri, Version, header};
use http_body_util::Empty;
use torpor_headers::{check, upgrade};
use torpor_protocol::api::PREVIEW_HEADER;

use crate::headers::{is_grpc, prepare, request_id};
use crate::{Target, route};

/// A target survives its text; a request that is let in has one host, no header of ours, and nothing that
/// is only for the connection it came on. The input has a line for the target and one for each header.
pub fn preview_request(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let uri = lines.next().and_then(|line| Uri::try_from(line).ok());
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = uri.unwrap_or_default();
    *request.version_mut() = Version::HTTP_11;
    for line in lines.take(100) {
        let mut parts = line.splitn(2, |byte| *byte == b':');
        let name = parts.next().and_then(|name| HeaderName::from_bytes(name).ok());
        let value = parts.next().and_then(|value| HeaderValue::from_bytes(value).ok());
        let (Some(name), Some(value)) = (name, value) else { continue };
        request.headers_mut().append(name, value);
    }
    if let Some(target) = route(&request) {
        assert_eq!(Target::parse(&target.to_string()), Some(target));
    }
    let _ = (upgrade(&request), is_grpc(&request), request_id(request.headers_mut()));
    if check(&request).is_err() {
        return;
    }
    prepare(&mut request, 80, Some(([127, 0, 0, 1], 9).into()));
    let headers = request.headers();
    assert_eq!(headers.get_all(header::HOST).iter().count(), 1, "it has one host");
    for gone in [header::CONNECTION, header::TRANSFER_ENCODING, header::UPGRADE] {
        assert!(!headers.contains_key(&gone), "{gone} is for the connection");
    }
    assert!(!headers.contains_key(PREVIEW_HEADER), "it is ours");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_preview_request() {
        input::replay("preview_request", preview_request);
    }
}
