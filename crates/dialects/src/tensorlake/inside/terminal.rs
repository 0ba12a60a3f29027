//! A terminal on a WebSocket, in frames of Tensorlake's: an opcode, then what belongs to it.
//!
//! ```text
//!  00 bytes           both ways: what is typed, what is shown
//!  01 cols rows       from the client, each u16 big-endian
//!  02                 from the client: it can show something now
//!  03 code            from here, i32 big-endian: how it ended
//! ```
//!
//! Input and output are two loops that never wait for each other.

use std::time::Duration;

use axum::extract::ws::{WebSocket, close_code};
use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio::time::timeout;
use torpor_protocol::api::ExitReport;
use torpor_protocol::guest::{Exit, FailureCode, Request};
use torpor_service::error::{Error, GuestError};
use torpor_service::processes::{Output, Said};
use torpor_service::{Guest, Sender, Service};
use torpor_web::socket::{self, Left, Reader, Received, Writer};

use super::pty::{COLS_MAX, ROWS_MAX};
use super::tail::fell_asleep;

const DATA: u8 = 0;
const RESIZE: u8 = 1;
const READY: u8 = 2;
const EXIT: u8 = 3;

/// Largest frame of a client, as in Tensorlake's daemon.
const FRAME_MAX: usize = 64 * 1024;
/// Who is not ready by then does not know that it has to say so.
const READY_DEADLINE: Duration = Duration::from_secs(10);
/// Longest reason that fits into a frame that closes.
const REASON_MAX: usize = 123;

/// SIGHUP, SIGKILL and SIGTERM: somebody ended the session.
const TERMINATING: [i32; 3] = [1, 9, 15];

/// How it ended, as one number: a signal is negative, as in what `run` gives.
pub(super) fn code(exit: Exit) -> i32 {
    let (code, signal) = super::processes::parts(exit);
    signal.map_or(code.unwrap_or(0), |signal| -signal)
}

/// Why a conversation is over.
enum Over {
    /// The client is gone.
    Left,
    /// What it is told.
    Close(u16, String),
}

impl From<Left> for Over {
    fn from(_: Left) -> Self {
        Self::Left
    }
}

/// Until the process ended, the client left, or the daemon stops.
pub(super) async fn talk(service: &Service, socket: WebSocket, mut output: Output) {
    let (mut reader, mut writer) = socket::split(socket);
    let hands = Hands {
        sender: output.stream.sender(),
        guest: output.awake().lease.guest().clone(),
        pid: output.started.pid,
    };
    let ready = Notify::new();
    let over = tokio::select! {
        over = show(&mut output, &mut writer, &ready) => over,
        over = receive_input(&mut reader, &hands, &ready) => over,
        () = service.stopping.cancelled() => {
            Over::Close(close_code::AWAY, "the daemon stops".to_owned())
        }
    };
    match over {
        Over::Left => tracing::debug!("the client left"),
        Over::Close(code, reason) => {
            writer.close(code, &reason[..reason.floor_char_boundary(REASON_MAX)]).await;
            reader.wait_for_close().await;
        }
    }
}

// === Out ===

async fn show(output: &mut Output, writer: &mut Writer, ready: &Notify) -> Over {
    let _ = timeout(READY_DEADLINE, ready.notified()).await;
    loop {
        // What is there together goes together.
        let said = match output.next().now_or_never() {
            Some(said) => said,
            None => {
                if let Err(left) = writer.flush().await {
                    return left.into();
                }
                tokio::select! {
                    said = output.next() => said,
                    left = writer.keep_alive() => return left.into(),
                }
            }
        };
        let frame = match said {
            Ok(Some(Said::Bytes(_, bytes))) => socket::marked(DATA, &bytes),
            Ok(Some(Said::Skipped(_) | Said::At(_))) => continue,
            Ok(Some(Said::Exited(report))) => return farewell(&report, writer).await,
            Ok(None) => return Over::Close(socket::ERROR, "its output broke off".to_owned()),
            Err(error) => return broke(&error),
        };
        if let Err(left) = writer.feed(frame).await {
            return left.into();
        }
    }
}

/// It has ended by itself, or was ended.
async fn farewell(report: &ExitReport, writer: &mut Writer) -> Over {
    if report.signal.is_some_and(|signal| TERMINATING.contains(&signal)) {
        return Over::Close(close_code::AWAY, "session terminated".to_owned());
    }
    let code = report.signal.map_or(report.exit_code.unwrap_or(-1), |signal| -signal);
    match writer.feed(socket::marked(EXIT, &code.to_be_bytes())).await {
        Ok(()) => Over::Close(close_code::NORMAL, format!("exit:{code}")),
        Err(left) => left.into(),
    }
}

/// Who is cut off because the sandbox was put to sleep may connect again, which wakes it.
fn broke(error: &Error) -> Over {
    if fell_asleep(error) {
        let reason = "the sandbox was put to sleep; connect again";
        return Over::Close(close_code::AWAY, reason.to_owned());
    }
    if let Some(blame) = error.internal() {
        tracing::error!(error = blame, "a terminal broke off");
    }
    Over::Close(socket::ERROR, error.to_body("").message)
}

// === In ===

/// What a client can do to a session.
struct Hands {
    sender: Sender,
    guest: Guest,
    pid: u32,
}

async fn receive_input(reader: &mut Reader, hands: &Hands, ready: &Notify) -> Over {
    while let Some(received) = reader.recv().await {
        let frame = match received {
            Received::Bytes(frame) => frame,
            Received::Text(_) => continue,
        };
        if frame.len() > FRAME_MAX {
            let reason = format!("a frame has at most {FRAME_MAX} bytes");
            return Over::Close(close_code::SIZE, reason);
        }
        match hands.obey(&frame, ready).await {
            Ok(()) => {}
            // It has just ended: its exit is on the way to the client.
            Err(GuestError::Refused { code: FailureCode::NoSuchProcess, .. }) => {}
            // The other loop sees the same, and knows better why.
            Err(GuestError::Gone | GuestError::Asleep) => return std::future::pending().await,
            Err(error) => return broke(&error.into()),
        }
    }
    Over::Left
}

impl Hands {
    /// Frames that nobody knows mean nothing.
    async fn obey(&self, frame: &[u8], ready: &Notify) -> Result<(), GuestError> {
        match frame {
            [DATA, typed @ ..] => self.sender.send(typed).await,
            [RESIZE, a, b, c, d] => {
                let cols = u16::from_be_bytes([*a, *b]).clamp(1, COLS_MAX);
                let rows = u16::from_be_bytes([*c, *d]).clamp(1, ROWS_MAX);
                self.guest.done(&Request::Resize { pid: self.pid, cols, rows }).await
            }
            [READY, ..] => {
                ready.notify_one();
                Ok(())
            }
            [] | [_, ..] => Ok(()),
        }
    }
}
