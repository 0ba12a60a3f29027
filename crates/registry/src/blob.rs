//! Large blobs into a file, gone on with where a connection was cut.
//!
//! - What is in the file already is counted and hashed, so that the next attempt, or the next daemon, asks
//!   for the rest only.
//! - The file is right when [`Client::fetch`] returns: size and digest were compared. A file that is wrong
//!   is emptied, so it can't be gone on with.
//! - An endpoint answers for its own bytes only: if a file that somebody else began is wrong, it is asked
//!   for all of it before it counts as wrong.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use http::StatusCode;
use http::header::CONTENT_RANGE;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncSeekExt, AsyncWriteExt, BufWriter};

use crate::auth::Scope;
use crate::client::{Ask, Client, pause};
use crate::endpoint::{Endpoint, no_endpoint};
use crate::error::disk;
use crate::wire::piece;
use crate::{Descriptor, Digest, Error, Reference, Result};

/// Attempts at one blob that each brought something.
const RESUMES_MAX: u32 = 64;
/// Written at a time.
const BUFFER: usize = 1024 * 1024;

impl Client {
    /// Fetches a blob into a file that may have its beginning. `tell` hears how many bytes are there,
    /// now and then.
    pub async fn fetch(
        &self,
        of: &Reference,
        blob: &Descriptor,
        file: &Path,
        tell: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        let mut failed = no_endpoint();
        for endpoint in self.endpoints(&of.registry)? {
            let mut part = Part::open(file).await?;
            match self.fetch_at(&endpoint, of, blob, &mut part, tell).await {
                Ok(()) => return Ok(()),
                Err(error) => failed = endpoint.passed_over(of, error),
            }
        }
        Err(failed)
    }

    async fn fetch_at(
        &self,
        endpoint: &Endpoint,
        of: &Reference,
        blob: &Descriptor,
        part: &mut Part,
        tell: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        let (mut attempt, mut resumes) = (1, 0);
        loop {
            let before = part.have;
            let error = match self.fetch_once(endpoint, of, blob, part, tell).await {
                Ok(()) => {
                    let foreign = part.foreign;
                    match part.check(endpoint, blob).await {
                        Err(Error::Wrong { .. }) if foreign => {
                            tracing::debug!(digest = %blob.digest, "what was left of a layer is wrong");
                            continue;
                        }
                        checked => return checked,
                    }
                }
                Err(error) => error,
            };
            part.flush().await?;
            if part.have > before && resumes < RESUMES_MAX {
                (attempt, resumes) = (1, resumes + 1);
            }
            let Some(wait) = pause(&error, attempt, &endpoint.wire.patience) else {
                return Err(error);
            };
            tracing::debug!(digest = %blob.digest, have = part.have, %error, "going on with a layer");
            tokio::time::sleep(wait).await;
            attempt += 1;
        }
    }

    async fn fetch_once(
        &self,
        endpoint: &Endpoint,
        of: &Reference,
        blob: &Descriptor,
        part: &mut Part,
        tell: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        if part.have > blob.size {
            part.empty().await?;
        }
        if part.have == blob.size {
            return Ok(());
        }
        let url = endpoint.url(&of.repository, "blobs", blob.digest.as_str());
        let ask = Ask::get(url, format!("blob {}", blob.digest)).from(part.have);
        let answer = match self.request(endpoint, &Scope::pull(&of.repository), &ask).await {
            // It does not go on from there: 416, in the words of `checked`.
            Err(Error::Garbled { .. }) if part.have > 0 => {
                part.empty().await?;
                return Err(endpoint.unreachable("it does not go on with a blob"));
            }
            answer => answer?,
        };
        if part.have > 0 && !continues(&answer, part.have) {
            part.empty().await?;
        }
        let mut body = answer.into_body();
        while let Some(data) = piece(&mut body, &endpoint.wire.patience)
            .await
            .map_err(|why| endpoint.unreachable(why))?
        {
            if part.have + data.len() as u64 > blob.size {
                part.empty().await?;
                let what = format!("blob {} from {}", blob.digest, endpoint.name);
                return Err(Error::TooLarge { what, limit: blob.size });
            }
            part.write(&data).await?;
            tell(part.have);
        }
        if part.have < blob.size {
            return Err(endpoint.unreachable("it stopped in the middle of a blob"));
        }
        Ok(())
    }
}

/// Whether the answer begins where the file ends.
fn continues(answer: &http::Response<hyper::body::Incoming>, have: u64) -> bool {
    let range = answer.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
    let from =
        range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
    answer.status() == StatusCode::PARTIAL_CONTENT && from == Some(have)
}

/// The file, with the hash of what is in it.
struct Part {
    file: BufWriter<tokio::fs::File>,
    hasher: Sha256,
    have: u64,
    /// Whether some of it was there before: of another endpoint, or another daemon.
    foreign: bool,
}

impl Part {
    async fn open(path: &Path) -> Result<Self> {
        let path = path.to_owned();
        let opened = tokio::task::spawn_blocking(move || {
            let mut options = File::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            let mut file = options.open(&path)?;
            let (mut hasher, mut have) = (Sha256::new(), 0);
            let mut buffer = vec![0; BUFFER];
            loop {
                let count = file.read(&mut buffer)?;
                if count == 0 {
                    return io::Result::Ok((file, hasher, have));
                }
                hasher.update(&buffer[..count]);
                have += count as u64;
            }
        });
        let opened = opened.await.unwrap_or_else(|died| Err(died.into()));
        let (file, hasher, have) = opened.map_err(disk("read a partial layer"))?;
        let file = BufWriter::with_capacity(BUFFER, tokio::fs::File::from_std(file));
        Ok(Self { file, hasher, have, foreign: have > 0 })
    }

    async fn write(&mut self, data: &[u8]) -> Result<()> {
        self.file.write_all(data).await.map_err(disk("write a layer"))?;
        self.hasher.update(data);
        self.have += data.len() as u64;
        Ok(())
    }

    async fn flush(&mut self) -> Result<()> {
        self.file.flush().await.map_err(disk("write a layer"))
    }

    async fn empty(&mut self) -> Result<()> {
        self.flush().await?;
        let file = self.file.get_mut();
        file.set_len(0).await.map_err(disk("empty a partial layer"))?;
        file.rewind().await.map_err(disk("empty a partial layer"))?;
        (self.hasher, self.have, self.foreign) = (Sha256::new(), 0, false);
        Ok(())
    }

    async fn check(&mut self, endpoint: &Endpoint, blob: &Descriptor) -> Result<()> {
        self.flush().await?;
        let found = Digest::finish(self.hasher.clone());
        if found == blob.digest {
            return self.file.get_ref().sync_all().await.map_err(disk("write a layer"));
        }
        self.empty().await?;
        Err(Error::Wrong {
            registry: endpoint.name.clone(),
            what: "a layer".to_owned(),
            expected: blob.digest.clone(),
            found: found.to_string(),
        })
    }
}
