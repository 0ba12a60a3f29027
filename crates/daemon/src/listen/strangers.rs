//! What people may make us hold before we know what they want.
//!
//! - Bytes of heads that are not complete: what fits the first buffer of a connection is free, so an ordinary
//!   request always gets through. What is beyond comes out of one budget for all connections; who wants
//!   more when it is spent is cut off.
//! - Places: when there is none left, who has been there longest without a request makes room.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http::{Response, StatusCode};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

/// What a connection may send of a head at any time: hyper's first buffer.
const FREE: usize = 8 * 1024;
/// What all connections together may send beyond.
const BUDGET: usize = 16 * 1024 * 1024;

/// All connections without a request.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    /// Of the budget.
    spent: AtomicUsize,
    waiting: AtomicUsize,
    came: Notify,
    /// Wakes the one that waits longest.
    leave: Notify,
}

impl Strangers {
    /// Until this connection has to make room.
    pub(super) async fn wait(&self) {
        let _waits = Waits::one(&self.waiting);
        self.came.notify_one();
        self.leave.notified().await;
    }

    /// Asks one of them to leave, as soon as there is one.
    pub(super) async fn make_room(&self) {
        while self.waiting.load(Ordering::Relaxed) == 0 {
            self.came.notified().await;
        }
        self.leave.notify_one();
    }

    /// For one more connection.
    pub(super) fn share(self: &Arc<Self>) -> Arc<Share> {
        let all = Arc::clone(self);
        Arc::new(Share { all, sent: AtomicUsize::new(0), answering: AtomicUsize::new(0) })
    }
}

struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn one(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What one connection has sent of a head that is not complete.
#[derive(Debug)]
pub(super) struct Share {
    all: Arc<Strangers>,
    sent: AtomicUsize,
    /// Requests that are being answered. While there is one, what arrives is its body.
    answering: AtomicUsize,
}

fn beyond(sent: usize) -> usize {
    sent.saturating_sub(FREE)
}

impl Share {
    fn received(&self, count: usize) -> io::Result<()> {
        if self.answering.load(Ordering::Relaxed) > 0 {
            return Ok(());
        }
        let before = self.sent.fetch_add(count, Ordering::Relaxed);
        let more = beyond(before + count) - beyond(before);
        let spent = self.all.spent.fetch_add(more, Ordering::Relaxed);
        if more > 0 && spent + more > BUDGET {
            return Err(io::Error::other("too many large heads at the same time"));
        }
        Ok(())
    }

    /// Whatever was sent is used up.
    fn settle(&self) {
        let sent = self.sent.swap(0, Ordering::Relaxed);
        self.all.spent.fetch_sub(beyond(sent), Ordering::Relaxed);
    }

    /// A head is complete: from here to the end of the answer, what arrives is free.
    pub(super) fn answer(self: &Arc<Self>) -> Answering {
        self.settle();
        self.answering.fetch_add(1, Ordering::Relaxed);
        Answering(Arc::clone(self))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.settle();
    }
}

/// A request that is being answered.
pub(super) struct Answering(Arc<Share>);

impl Answering {
    /// Ends with the body. What follows an upgrade is no HTTP, and never counts.
    pub(super) fn until_sent(self, response: Response<Body>) -> Response<Body> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            self.0.answering.fetch_add(1, Ordering::Relaxed);
            return response;
        }
        response.map(|inner| Body::new(Sent { inner, _answering: self }))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.answering.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Sent {
    inner: Body,
    _answering: Answering,
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A connection whose bytes are counted.
pub(super) struct Counted<S> {
    pub(super) inner: S,
    pub(super) share: Arc<Share>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = std::task::ready!(Pin::new(&mut self.inner).poll_read(cx, buf));
        let count = buf.filled().len() - before;
        Poll::Ready(read.and_then(|()| self.share.received(count)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Who is answered sent something whole: in HTTP/2 not all of it is requests.
        self.share.settle();
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.share.settle();
        Pin::new(&mut self.inner).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[test]
    fn small_heads_are_free_and_large_ones_share_a_budget() {
        let all = Arc::<Strangers>::default();
        let most: Vec<_> = (0..256).map(|_| all.share()).collect();
        for share in &most {
            share.received(FREE + BUDGET / 256).unwrap();
        }
        let late = all.share();
        late.received(FREE).unwrap();
        assert!(late.received(1).is_err());
        drop(late);
        // One of them turns out to be a request.
        let answering = most[0].answer();
        let other = all.share();
        other.received(FREE + BUDGET / 256).unwrap();
        most[0].received(BUDGET).unwrap();
        drop(answering);
        assert!(most[0].received(FREE + 1).is_err());
        drop((most, other));
        assert_eq!(all.spent.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn what_was_answered_is_used_up() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let all = Arc::<Strangers>::default();
        let (near, mut far) = tokio::io::duplex(64 * 1024);
        let mut counted = Counted { inner: near, share: all.share() };
        far.write_all(&[0; FREE + 100]).await.unwrap();
        counted.read_exact(&mut vec![0; FREE + 100]).await.unwrap();
        assert_eq!(all.spent.load(Ordering::Relaxed), 100);
        counted.write_all(b"pong").await.unwrap();
        assert_eq!(all.spent.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn who_waits_longest_makes_room() {
        let all = Strangers::default();
        let now = Duration::ZERO;
        assert!(timeout(now, all.make_room()).await.is_err(), "there is nobody");
        let (mut first, mut second) = (pin!(all.wait()), pin!(all.wait()));
        assert!(timeout(now, first.as_mut()).await.is_err(), "nobody is asked ahead");
        assert!(timeout(now, second.as_mut()).await.is_err());
        all.make_room().await;
        assert!(timeout(now, second.as_mut()).await.is_err());
        assert!(timeout(now, first.as_mut()).await.is_ok());
    }
}
