//! Bytes that a client sends, within a limit: passed on as they come, or written to disk.

use std::io;
use std::path::Path;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::fs::File;
use tokio::io::{AsyncWriteExt, BufWriter};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;

use crate::builds::pipe::Inlet;
use crate::error::{Error, Result};

/// Bytes gathered before they are written to disk.
const GATHER: usize = 1024 * 1024;

/// What a client sends, piece by piece, as its transport brings it.
pub type Pieces = BoxStream<'static, io::Result<Bytes>>;

/// The next piece; none after the last.
pub(crate) async fn next_piece(pieces: &mut Pieces) -> Result<Option<Bytes>> {
    let piece = pieces.next().await.transpose();
    piece.map_err(|error| Error::invalid(format!("the body broke off: {error}")))
}

/// What is sent, and how much of it there may still be.
pub struct Upload {
    pieces: Pieces,
    limit: u64,
    left: u64,
}

impl Upload {
    pub fn new(pieces: Pieces, limit: u64) -> Self {
        Self { pieces, limit, left: limit }
    }

    async fn next(&mut self) -> Result<Option<Bytes>> {
        let Some(data) = next_piece(&mut self.pieces).await? else { return Ok(None) };
        let size = u64::try_from(data.len()).unwrap_or(u64::MAX);
        self.left = self.left.checked_sub(size).ok_or_else(|| {
            let message = format!("the body has more than {} bytes", self.limit);
            Error::new(ErrorCode::TooLarge, message)
        })?;
        Ok(Some(data))
    }

    /// Passes everything on. If nobody wants it any more the rest is read all the same: a client
    /// that is still sending would not see the answer.
    pub async fn pour(mut self, inlet: Inlet) -> Result<()> {
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
    pub async fn save(mut self, path: &Path, mut see: impl FnMut(&[u8])) -> Result<()> {
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

    fn pieces(text: &'static str) -> Pieces {
        futures_util::stream::iter([Ok(Bytes::from_static(text.as_bytes()))]).boxed()
    }

    #[tokio::test]
    async fn a_body_within_its_limit_arrives() {
        let (inlet, mut outlet) = inward();
        let reading = tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            outlet.read_to_string(&mut text).map(|_| text)
        });
        Upload::new(pieces("hello"), 5).pour(inlet).await.unwrap();
        assert_eq!(reading.await.unwrap().unwrap(), "hello");
    }

    #[tokio::test]
    async fn a_body_beyond_its_limit_is_refused_and_nothing_is_taken_for_whole() {
        let (inlet, mut outlet) = inward();
        let reading = tokio::task::spawn_blocking(move || outlet.read_to_end(&mut Vec::new()));
        let error = Upload::new(pieces("hello!"), 5).pour(inlet).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::TooLarge);
        assert!(reading.await.unwrap().is_err());
    }

    #[tokio::test]
    async fn what_nobody_wants_is_read_to_its_end() {
        let (inlet, outlet) = inward();
        drop(outlet);
        Upload::new(pieces("hello"), 5).pour(inlet).await.unwrap();
    }
}
