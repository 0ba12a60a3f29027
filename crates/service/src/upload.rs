//! The body of a request for code that blocks: passed on as it comes, within a limit.

use std::io;
use std::path::Path;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::fs::File;
use tokio::io::{AsyncWriteExt, BufWriter};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;

use crate::api::error::{ApiError, Result};
use crate::builds::pipe::Inlet;

/// Bytes gathered before they are written to disk.
const GATHER: usize = 1024 * 1024;

/// A body, and how much of it there may still be.
pub(crate) struct Upload {
    body: Body,
    limit: u64,
    left: u64,
}

impl Upload {
    pub(crate) fn new(body: Body, limit: u64) -> Self {
        Self { body, limit, left: limit }
    }

    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            let broken = |error| ApiError::invalid(format!("the body broke off: {error}"));
            // What is no data is a trailer, and means nothing here.
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            let size = u64::try_from(data.len()).unwrap_or(u64::MAX);
            self.left = self.left.checked_sub(size).ok_or_else(|| {
                let message = format!("the body has more than {} bytes", self.limit);
                ApiError::new(ErrorCode::TooLarge, message)
            })?;
            return Ok(Some(data));
        }
    }

    /// Passes everything on. If nobody wants it any more the rest is read all the same: a client
    /// that is still sending would not see the answer.
    pub(crate) async fn pour(mut self, inlet: Inlet) -> Result<()> {
        let mut wanted = true;
        loop {
            match self.next().await {
                Ok(Some(bytes)) => wanted = wanted && inlet.send(bytes).await,
                Ok(None) => {
                    inlet.finish().await;
                    return Ok(());
                }
                Err(error) => {
                    inlet.fail(io::Error::other(error.to_string())).await;
                    return Err(error);
                }
            }
        }
    }

    /// Writes everything to a new file; `see` sees it on the way.
    pub(crate) async fn save(mut self, path: &Path, mut see: impl FnMut(&[u8])) -> Result<()> {
        let file = File::create_new(path).await.map_err(unwritten)?;
        let mut file = BufWriter::with_capacity(GATHER, file);
        while let Some(bytes) = self.next().await? {
            see(&bytes);
            file.write_all(&bytes).await.map_err(unwritten)?;
        }
        Ok(file.flush().await.map_err(unwritten)?)
    }
}

fn unwritten(error: io::Error) -> StoreError {
    if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
        return StoreError::DiskFull("the upload does not fit".to_owned());
    }
    StoreError::failed("write an upload to disk")(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builds::pipe::inward;
    use std::io::Read;

    #[tokio::test]
    async fn a_body_within_its_limit_arrives() {
        let (inlet, mut outlet) = inward();
        let reading = tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            outlet.read_to_string(&mut text).map(|_| text)
        });
        Upload::new(Body::from("hello"), 5).pour(inlet).await.unwrap();
        assert_eq!(reading.await.unwrap().unwrap(), "hello");
    }

    #[tokio::test]
    async fn a_body_beyond_its_limit_is_refused_and_nothing_is_taken_for_whole() {
        let (inlet, mut outlet) = inward();
        let reading = tokio::task::spawn_blocking(move || outlet.read_to_end(&mut Vec::new()));
        let error = Upload::new(Body::from("hello!"), 5).pour(inlet).await.unwrap_err();
        assert_eq!(error.told("").code, ErrorCode::TooLarge);
        assert!(reading.await.unwrap().is_err());
    }

    #[tokio::test]
    async fn what_nobody_wants_is_read_to_its_end() {
        let (inlet, outlet) = inward();
        drop(outlet);
        Upload::new(Body::from("hello"), 5).pour(inlet).await.unwrap();
    }
}
