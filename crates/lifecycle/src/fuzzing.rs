//! Entry point of a fuzz target: what holds whatever an agent answers.

#[path = "../../../fuzz/input.rs"]
mod input;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use torpor_protocol::guest::{Frame, Kind, Request};

use crate::engine::Channel;
use crate::guest::{Guest, Stream};

/// An agent that says hello, then these packets, and is gone.
struct Scripted(Mutex<VecDeque<Bytes>>);

#[async_trait]
impl Channel for Scripted {
    async fn send(&self, packet: Bytes) -> io::Result<()> {
        if Frame::parse(&packet).is_ok_and(|frame| frame.kind == Kind::Hello) {
            self.0.lock().push_front(packet);
        }
        Ok(())
    }

    async fn recv(&self) -> io::Result<Bytes> {
        Ok(self.0.lock().pop_front().unwrap_or_default())
    }
}

/// Every stream ends.
pub fn guest_channel(bytes: &[u8]) {
    let packets = input::parts(bytes).into_iter().map(Bytes::copy_from_slice).collect();
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime can be made");
    runtime.block_on(async {
        let channel = Arc::new(Scripted(Mutex::new(packets)));
        let guest = Guest::connect(channel, Duration::from_secs(1)).await.expect("it said hello");
        let mut streams = Vec::new();
        for request in [Request::Health, Request::Processes, Request::Lines { after_us: 0 }] {
            streams.push(guest.open(&request).await.expect("nobody said anything yet"));
        }
        for stream in streams {
            tokio::time::timeout(Duration::from_secs(1), exhaust(stream)).await.expect("it ends");
        }
        tokio::time::timeout(Duration::from_secs(1), guest.gone()).await.expect("it is gone");
    });
}

async fn exhaust(mut stream: Stream) {
    while let Ok(Some(_)) = stream.next().await {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_guest_channel() {
        input::replay("guest_channel", guest_channel);
    }
}
