//! A connection that left HTTP, such as a WebSocket: bytes go both ways as they are, but secrets that
//! were put into its request don't come back in the clear.

use std::time::Duration;

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::timeout;

use super::redact::{Needles, Sieve};

/// How long both sides may take to leave HTTP after they agreed to.
const UPGRADE_DEADLINE: Duration = Duration::from_secs(30);
/// How long one direction may go on when the other has ended.
const LINGER: Duration = Duration::from_secs(60);
/// Bytes that are passed on at once.
const PIECE: usize = 16 << 10;

/// Passes bytes on until both sides are done.
pub(super) async fn tunnel(guest: OnUpgrade, server: OnUpgrade, needles: Needles) {
    let both = async { tokio::try_join!(guest, server) };
    let (guest, server) = match timeout(UPGRADE_DEADLINE, both).await {
        Ok(Ok(both)) => both,
        Ok(Err(error)) => return tracing::debug!(%error, "upgrade failed"),
        Err(_) => return tracing::debug!("upgrade timed out"),
    };
    let (from_guest, to_guest) = tokio::io::split(TokioIo::new(guest));
    let (from_server, to_server) = tokio::io::split(TokioIo::new(server));
    let mut out = std::pin::pin!(pass(from_guest, to_server, Sieve::new(Needles::default())));
    let mut back = std::pin::pin!(pass(from_server, to_guest, Sieve::new(needles)));
    let _ = tokio::select! {
        () = &mut out => timeout(LINGER, back).await,
        () = &mut back => timeout(LINGER, out).await,
    };
}

/// One direction. When it breaks, its other end learns by the end.
async fn pass(
    mut from: ReadHalf<TokioIo<Upgraded>>,
    mut to: WriteHalf<TokioIo<Upgraded>>,
    mut sieve: Sieve,
) {
    let mut piece = vec![0; PIECE];
    while let Ok(count) = from.read(&mut piece).await {
        let clean = match count {
            0 => sieve.end(),
            count => sieve.push(&piece[..count]),
        };
        if to.write_all(&clean).await.is_err() || to.flush().await.is_err() || count == 0 {
            break;
        }
    }
    let _ = to.shutdown().await;
}
