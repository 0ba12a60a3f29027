//! What a caller puts on a request, and finds on an answer, that is not HTTP: extensions.

use std::any::Any;
use std::num::NonZeroU16;
use std::sync::Arc;

use http::{Request, Response};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::forward::Body;

/// On a request: a connection that it upgrades ends when this is cancelled. (Other answers end when
/// their body is dropped.)
#[derive(Debug, Clone)]
pub struct Until(pub CancellationToken);

impl Until {
    /// Does the work, or stops in the middle of it.
    pub(crate) async fn limit(until: Option<Self>, work: impl Future<Output = ()>) {
        match until {
            None => work.await,
            Some(Self(until)) => tokio::select! {
                () = work => {}
                () = until.cancelled() => tracing::debug!("an upgraded connection was cut off"),
            },
        }
    }
}

/// On a request: something that is kept until the request is over, with the connection that it upgrades.
#[derive(Clone)]
pub struct Held(pub Arc<dyn Any + Send + Sync>);

/// On an answer: it is ours, because nothing listens on this port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotListening(pub NonZeroU16);

/// On an answer of ours: the request as it came. Nothing of it was used up, so it may go elsewhere.
#[derive(Clone)]
pub struct Unsent(Arc<Mutex<Option<Request<Body>>>>);

impl Unsent {
    pub(crate) fn new(request: Request<Body>) -> Self {
        Self(Arc::new(Mutex::new(Some(request))))
    }

    /// Of an answer that has one.
    pub fn take<B>(answer: &mut Response<B>) -> Option<Request<Body>> {
        answer.extensions_mut().remove::<Self>()?.0.lock().take()
    }
}
