//! Entry point of a fuzz target: what holds whatever a QEMU says.

use super::{LINE_MAX, Monitor, WORDS_MAX, shortened};
use crate::input;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

/// The same lines are heard however they come, one of them is kept at most, and words are short.
pub fn qemu_monitor(bytes: &[u8]) {
    let Some((content, pieces)) = input::pieces(bytes) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.expect("a runtime can be made");
    let whole = runtime.block_on(heard(&[content]));
    assert_eq!(runtime.block_on(heard(&pieces)), whole);
}

async fn heard(pieces: &[&[u8]]) -> Vec<String> {
    let (stream, mut qemu) = UnixStream::pair().expect("a socket can be made");
    let mut monitor = Monitor { stream, unread: Vec::new(), calls: 0, loading: None };
    let saying = async move {
        for piece in pieces {
            qemu.write_all(piece).await.expect("it is read");
            tokio::task::yield_now().await;
        }
    };
    let hearing = async {
        let mut lines = Vec::new();
        while let Ok(said) = monitor.next().await {
            assert!(monitor.unread.len() <= 2 * LINE_MAX, "{} bytes", monitor.unread.len());
            if let Some(refusal) = &said.error {
                assert!(shortened(&refusal.desc).chars().count() <= WORDS_MAX, "it is short");
            }
            lines.push(format!("{said:?}"));
        }
        // After an error the socket is not read: who speaks must not wait for that.
        drop(monitor);
        lines
    };
    tokio::select! {
        biased;
        lines = hearing => lines,
        () = async { saying.await; std::future::pending().await } => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_qemu_monitor() {
        input::replay("qemu_monitor", qemu_monitor);
    }
}
