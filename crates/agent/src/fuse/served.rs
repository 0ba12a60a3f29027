//! A stream that serves a mount: calls out, answers in.

use std::rc::Rc;

use torpor_protocol::guest::files::{BadMessage, Joiner};
use torpor_protocol::guest::{Failure, FailureCode, Kind};

use super::mount::Mount;
use crate::failure::failure;
use crate::stream::Stream;

/// Whose turn it is ends with the stream, whatever ends that.
struct Turn<'a, F: Fn()> {
    mount: &'a Rc<Mount>,
    number: u64,
    changed: F,
}

impl<F: Fn()> Drop for Turn<'_, F> {
    fn drop(&mut self) {
        if self.mount.stream.get() == Some(self.number) {
            self.mount.stream.set(None);
            (self.changed)();
        }
    }
}

/// Serves the mount by this stream, until it ends or another one does.
pub(super) async fn serve(
    mount: &Rc<Mount>,
    stream: &Rc<Stream>,
    changed: impl Fn(),
) -> Result<(), Failure> {
    let number = mount.streams.replace(mount.streams.get() + 1);
    mount.stream.set(Some(number));
    mount.changed.notify_waiters();
    changed();
    let _turn = Turn { mount, number, changed };
    mount.state.borrow_mut().begin();
    let replaced = async {
        while mount.stream.get() == Some(number) {
            mount.changed.notified().await;
        }
    };
    tokio::select! {
        biased;
        () = replaced => Ok(()),
        () = send(mount, stream) => Ok(()),
        received = receive(mount, stream) => {
            received.map_err(|bad| failure(FailureCode::Invalid, bad.to_string()))
        }
    }
}

/// Sends calls as they come, several in a packet if there are several.
async fn send(mount: &Mount, stream: &Stream) {
    // The call that is under way, and how much of it.
    let mut current = None;
    loop {
        while current.is_none() && mount.state.borrow().queue.is_empty() {
            mount.calls.notified().await;
        }
        let mut broken = false;
        let fill = |room: &mut [u8]| {
            let filled = fill(mount, &mut current, room);
            broken = filled.is_none();
            let filled = filled.unwrap_or(0);
            Ok::<_, std::convert::Infallible>((filled > 0).then_some((Kind::Data, filled)))
        };
        let Ok(_) = stream.send_data(fill).await;
        if broken {
            return;
        }
    }
}

/// How many bytes of calls are in `room` now; none if one was answered before it was sent.
fn fill(mount: &Mount, current: &mut Option<(u64, usize)>, room: &mut [u8]) -> Option<usize> {
    let state = &mut *mount.state.borrow_mut();
    let mut filled = 0;
    while filled < room.len() {
        let (sequence, sent) = match *current {
            Some(current) => current,
            None => match state.queue.pop_front() {
                Some(sequence) => (sequence, 0),
                None => break,
            },
        };
        let Some(pending) = state.pending(sequence) else {
            // In the middle of it nobody could tell where the next begins.
            if sent > 0 {
                return None;
            }
            continue;
        };
        pending.sent = true;
        let rest = &pending.message[sent..];
        let length = rest.len().min(room.len() - filled);
        room[filled..filled + length].copy_from_slice(&rest[..length]);
        filled += length;
        *current = (length < rest.len()).then_some((sequence, sent + length));
    }
    Some(filled)
}

/// Takes answers until the end.
async fn receive(mount: &Mount, stream: &Stream) -> Result<(), BadMessage> {
    let mut joiner = Joiner::default();
    while let Some(bytes) = stream.receive().await {
        let mut bad = Ok(());
        joiner.push(&bytes, |message| {
            let state = &mut *mount.state.borrow_mut();
            bad = bad.and_then(|()| mount.answer(state, message));
        })?;
        bad?;
        mount.room.notify_one();
        if !mount.state.borrow().queue.is_empty() {
            mount.calls.notify_one();
        }
    }
    Ok(())
}
