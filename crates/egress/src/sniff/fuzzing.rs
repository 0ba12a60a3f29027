//! Entry point of a fuzz target: what holds whatever a guest says first.

use super::{BytesMut, Duration, PORTION, Protocol, SNIFF_MAX, Timeouts, sniff};
use crate::fuzzing::input;
use tokio::io::AsyncWriteExt;

const TIMEOUTS: Timeouts = Timeouts {
    first: Some(Duration::from_millis(200)),
    vague: Duration::from_secs(1),
    whole: Duration::from_secs(10),
};

/// It is taken for the same however it comes, unless it is too long; nothing of it is lost; a host is a
/// host.
pub fn sniff_first_bytes(bytes: &[u8]) {
    let Some((content, pieces)) = input::pieces(bytes) else { return };
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime can be made");
    let (whole, seen) = runtime.block_on(look(&[content]));
    assert!(content.starts_with(&seen) && seen.len() <= SNIFF_MAX + PORTION, "all is passed on");
    let (cut, seen) = runtime.block_on(look(&pieces));
    assert!(content.starts_with(&seen) && seen.len() <= SNIFF_MAX + PORTION, "all is passed on");
    if content.len() < SNIFF_MAX {
        assert_eq!(cut, whole);
    }
    if let Some(host) = whole.host() {
        assert!(!host.is_empty() && host.len() < 256, "{host:?}");
        assert!(!host.contains(|c: char| c.is_control() || c.is_whitespace()), "{host:?}");
    }
}

async fn look(pieces: &[&[u8]]) -> (Protocol, BytesMut) {
    let (mut guest, mut here) = tokio::io::duplex(2 * SNIFF_MAX);
    let mut seen = BytesMut::new();
    let speaking = async {
        for piece in pieces {
            guest.write_all(piece).await.expect("it is read");
            tokio::task::yield_now().await;
        }
        std::future::pending::<()>().await;
    };
    let protocol = tokio::select! {
        protocol = sniff(&mut here, &mut seen, TIMEOUTS) => protocol.expect("it can be read"),
        () = speaking => Protocol::Ended,
    };
    (protocol, seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_sniff_first_bytes() {
        input::replay("sniff_first_bytes", sniff_first_bytes);
    }
}
