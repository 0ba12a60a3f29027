//! Secrets of a build: they come before the context in the same body, and never reach a disk here.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;

use crate::error::{Error, Result};
use crate::upload::{Pieces, next_piece};

/// Bytes of all secrets of a build, as they are sent.
const SECRETS_MAX: usize = 1024 * 1024;

/// A value that commands of a build may see. Shows nothing of it.
#[derive(Clone)]
pub struct Secret(Arc<str>);

impl Secret {
    pub fn new(value: &str) -> Self {
        Self(value.into())
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// By their ids.
pub type Secrets = BTreeMap<String, Secret>;

/// Takes the first bytes of a body, a JSON object of ids and base64 values; gives the rest of it.
pub async fn split(mut body: Pieces, bytes: usize) -> Result<(Secrets, Pieces)> {
    if bytes == 0 {
        return Ok((Secrets::new(), body));
    }
    if bytes > SECRETS_MAX {
        return Err(Error::invalid(format!("secrets have more than {SECRETS_MAX} bytes")));
    }
    let mut head = BytesMut::new();
    while head.len() < bytes {
        let piece = next_piece(&mut body).await?;
        head.extend_from_slice(
            &piece.ok_or_else(|| Error::invalid("the body ends in its secrets"))?,
        );
    }
    let rest = head.split_off(bytes).freeze();
    let secrets = parse(&head)?;
    let rest = futures_util::stream::iter([Ok::<Bytes, std::io::Error>(rest)]);
    Ok((secrets, rest.chain(body).boxed()))
}

/// Nothing that is wrong with them is shown: it might be one.
fn parse(text: &[u8]) -> Result<Secrets> {
    let wrong = || Error::invalid("secrets are a JSON object of ids and base64 values");
    let read: BTreeMap<String, String> = serde_json::from_slice(text).map_err(|_| wrong())?;
    let decode = |(id, value): (String, String)| {
        let value = STANDARD.decode(value).map_err(|_| wrong())?;
        let text = String::from_utf8(value)
            .map_err(|_| Error::invalid(format!("the secret {id:.80} is not UTF-8")))?;
        Ok((id, Secret::new(&text)))
    };
    read.into_iter().map(decode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(parts: &[&'static str]) -> Pieces {
        let parts: Vec<_> =
            parts.iter().map(|part| Ok(Bytes::from_static(part.as_bytes()))).collect();
        futures_util::stream::iter(parts).boxed()
    }

    #[tokio::test]
    async fn secrets_are_taken_from_the_start_whatever_the_pieces_are() {
        let (secrets, mut rest) =
            split(pieces(&["{\"a\":", "\"eA==\"}ta", "r"]), 12).await.unwrap();
        assert_eq!(secrets["a"].as_str(), "x");
        assert_eq!(format!("{secrets:?}"), "{\"a\": Secret}");
        let mut left = Vec::new();
        while let Some(piece) = next_piece(&mut rest).await.unwrap() {
            left.extend_from_slice(&piece);
        }
        assert_eq!(left, b"tar");
    }

    #[tokio::test]
    async fn what_is_wrong_with_secrets_shows_nothing_of_them() {
        for (body, bytes) in [("{\"a\":\"hunter2\"}", 15), ("hunter2", 7), ("{", 2), ("", 9 << 20)]
        {
            let error = split(pieces(&[body]), bytes).await.err().unwrap().to_string();
            assert!(!error.contains("hunter"), "{error}");
        }
    }
}
