//! Push: blobs that the registry lacks, then the manifest that names them.

use std::path::Path;

use bytes::Bytes;
use futures_util::TryStreamExt;
use http::header::CONTENT_TYPE;
use http::{Method, StatusCode, Uri};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio::sync::watch;
use tokio_util::io::ReaderStream;

use crate::auth::{Scope, full};
use crate::client::{Ask, Client, encoded, location};
use crate::endpoint::Endpoint;
use crate::error::disk;
use crate::wire::{Body, Upload};
use crate::{Descriptor, Digest, Error, ImageManifest, Reference, Result};

/// Read from a file at a time: little enough that a slow connection takes one now and then.
const BUFFER: usize = 64 * 1024;

/// What a request carries. It can be sent again.
pub(crate) enum Payload<'a> {
    Bytes(Bytes),
    /// With its size, and who hears how much of it was sent.
    File(&'a Path, u64, &'a (dyn Fn(u64) + Sync)),
}

impl Payload<'_> {
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File(_, size, _) => *size,
        }
    }

    pub(crate) fn is_large(&self) -> bool {
        matches!(self, Self::File(..))
    }

    /// The body of a request, and how much of it was sent, if that is worth knowing.
    pub(crate) async fn open(&self) -> Result<(Body, Option<Upload<'_>>)> {
        match self {
            Self::Bytes(bytes) => Ok((full(bytes.clone()), None)),
            Self::File(path, size, tell) => {
                let file = tokio::fs::File::open(path).await.map_err(disk("open a layer"))?;
                let (sender, sent) = watch::channel(0);
                let pieces = ReaderStream::with_capacity(file, BUFFER).map_ok(move |piece| {
                    sender.send_modify(|sent| *sent += piece.len() as u64);
                    Frame::data(piece)
                });
                let upload = Upload { sent, size: *size, tell: *tell };
                Ok((BodyExt::boxed(StreamBody::new(pieces)), Some(upload)))
            }
        }
    }
}

/// How a blob came to be in a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    There,
    /// From another repository of the same registry.
    Mounted,
    Sent,
}

impl Client {
    /// Sees to it that a repository has a blob, which is in a file here. `from`: a repository of the same
    /// registry that may have it. `tell` hears how many bytes were sent, now and then.
    pub async fn push_file(
        &self,
        to: &Reference,
        blob: &Descriptor,
        file: &Path,
        from: Option<&str>,
        tell: &(dyn Fn(u64) + Sync),
    ) -> Result<Placed> {
        self.push_blob(to, blob, &Payload::File(file, blob.size, tell), from).await
    }

    /// The same of a small one.
    pub async fn push_bytes(
        &self,
        to: &Reference,
        blob: &Descriptor,
        bytes: Bytes,
    ) -> Result<Placed> {
        self.push_blob(to, blob, &Payload::Bytes(bytes), None).await
    }

    async fn push_blob(
        &self,
        to: &Reference,
        blob: &Descriptor,
        payload: &Payload<'_>,
        from: Option<&str>,
    ) -> Result<Placed> {
        let endpoint = self.own(&to.registry)?;
        let scope = Scope::push(&to.repository, from);
        let url = endpoint.url(&to.repository, "blobs", blob.digest.as_str());
        let head = Ask { method: Method::HEAD, ..Ask::get(url, to.to_string()) };
        match self.repeated(&endpoint, || self.request(&endpoint, &scope, &head)).await {
            Ok(_) => return Ok(Placed::There),
            Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
        self.repeated(&endpoint, || self.upload(&endpoint, &scope, to, blob, payload, from)).await
    }

    async fn upload(
        &self,
        endpoint: &Endpoint,
        scope: &Scope,
        to: &Reference,
        blob: &Descriptor,
        payload: &Payload<'_>,
        from: Option<&str>,
    ) -> Result<Placed> {
        let mut url = endpoint.url(&to.repository, "blobs", "uploads/");
        if let Some(from) = from.filter(|from| *from != to.repository) {
            url.push_str(&format!("?mount={}&from={}", blob.digest, encoded(from)));
        }
        let begin = Ask { method: Method::POST, ..Ask::get(url.clone(), to.to_string()) };
        let answer = self.request(endpoint, scope, &begin).await?;
        if answer.status() == StatusCode::CREATED {
            return Ok(Placed::Mounted);
        }
        let base: Uri = url.parse().map_err(|_| endpoint.garbled("an impossible address"))?;
        let place = location(answer.headers(), &base);
        let place = place.ok_or_else(|| endpoint.garbled("it names no place for an upload"))?;
        endpoint.allowed(&place)?;
        let joint = if place.contains('?') { '&' } else { '?' };
        let put = Ask {
            method: Method::PUT,
            url: format!("{place}{joint}digest={}", encoded(blob.digest.as_str())),
            headers: Vec::new(),
            payload: match payload {
                Payload::Bytes(bytes) => Payload::Bytes(bytes.clone()),
                Payload::File(path, size, tell) => Payload::File(path, *size, *tell),
            },
            what: format!("an upload to {to}"),
        };
        self.request(endpoint, scope, &put).await?;
        Ok(Placed::Sent)
    }

    /// Puts a manifest under a tag, or under its digest if the reference has none.
    pub async fn push_manifest(
        &self,
        to: &Reference,
        manifest: &ImageManifest,
        bytes: Bytes,
    ) -> Result<Digest> {
        let endpoint = self.own(&to.registry)?;
        let digest = Digest::of(&bytes);
        if to.digest.as_ref().is_some_and(|said| *said != digest) {
            let what = format!("{to}: the image has the digest {digest}");
            return Err(Error::Unsupported { reference: what, why: "name a tag".to_owned() });
        }
        let ask = Ask {
            method: Method::PUT,
            url: endpoint.url(&to.repository, "manifests", to.target()),
            headers: vec![(CONTENT_TYPE, manifest.sent_as().to_owned())],
            payload: Payload::Bytes(bytes),
            what: to.to_string(),
        };
        let scope = Scope::push(&to.repository, None);
        self.repeated(&endpoint, || self.request(&endpoint, &scope, &ask)).await?;
        Ok(digest)
    }
}
