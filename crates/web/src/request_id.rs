//! What a request is called in logs and answers.

use std::sync::Arc;

use http::HeaderMap;
use torpor_protocol::api::REQUEST_ID_HEADER;

/// Longest request id that is taken over from a client.
const REQUEST_ID_MAX: usize = 128;

/// The client's own id if it can stand in a log, else a fresh one.
pub fn request_id(headers: &HeaderMap) -> Arc<str> {
    let sane = |id: &&str| {
        (1..=REQUEST_ID_MAX).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let given = headers.get(REQUEST_ID_HEADER).and_then(|value| value.to_str().ok());
    given.filter(sane).map_or_else(fresh_id, Arc::from)
}

fn fresh_id() -> Arc<str> {
    let mut bytes = [0u8; 8];
    getrandom::fill(&mut bytes).expect("the system has entropy");
    format!("{:016x}", u64::from_le_bytes(bytes)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_for(given: &str) -> Arc<str> {
        let mut headers = HeaderMap::new();
        headers.insert(REQUEST_ID_HEADER, given.parse().unwrap());
        request_id(&headers)
    }

    #[test]
    fn a_sane_id_is_kept() {
        assert_eq!(&*id_for("abc-1.2_X"), "abc-1.2_X");
    }

    #[test]
    fn an_id_that_would_spoil_the_log_is_replaced() {
        for bad in ["", "a b", "a\tb", "{}", &"x".repeat(129)] {
            assert_ne!(&*id_for(bad), bad);
        }
    }
}
