//! A process inside at our standard input and output: what `run`, `exec` and `attach` share.
//!
//! ```text
//!   stdin ──▶ keys (detach?) ──▶ bytes ─┐
//!                                       ├─▶ writer task ─▶ WebSocket ─▶ reader ─▶ stdout, stderr
//!   signals, size ─────────▶ control ───┘
//! ```
//!
//! Reader and writer don't wait for each other: a process that is slow to read its input goes on
//! being read, else both sides could wait for ever.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Stderr, Stdout};
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_tungstenite::tungstenite::Message;
use torpor_client::Socket;
use torpor_protocol::api::{ExecInput, ExecOutput, ExitReport, STDERR_BYTE, STDOUT_BYTE};

use crate::error::{Error, Result};
use crate::signals::listen;
use crate::terminal;

/// Pieces of input on their way to the socket.
const INPUT_DEPTH: usize = 4;
/// Signals and sizes on their way; more at once say nothing new.
const CONTROL_DEPTH: usize = 16;
const INPUT_CHUNK: usize = 64 * 1024;

/// While whoever reads our output takes a break we read no pings; the daemon must not take us for
/// gone, so we say that we are here without being asked.
const ALIVE_EVERY: Duration = Duration::from_secs(10);

const CTRL_P: u8 = 0x10;
const CTRL_Q: u8 = 0x11;
const SIGINT: u8 = 2;
const SIGTERM: u8 = 15;

/// How our side takes part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seat {
    pub input: Input,
    /// The process has a terminal, which follows the size of ours.
    pub terminal: bool,
    /// ctrl-p ctrl-q leaves the process to itself.
    pub detach_keys: bool,
    /// Our first SIGINT or SIGTERM goes to the process; otherwise it ends us.
    pub pass_signals: bool,
}

/// What the process reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// Our standard input, to its end.
    Ours,
    /// Nothing: its input ends at once.
    Nothing,
    /// Whatever it reads is not our business.
    Untouched,
}

/// How it ended for us.
#[derive(Debug)]
pub(crate) enum End {
    Exited(ExitReport),
    /// We left; it runs on.
    Detached {
        pid: Option<u32>,
    },
}

/// Sits at a process until it ends or we leave. `start` is the first message, if there is one.
/// The caller holds raw mode, if any.
pub(crate) async fn sit(socket: Socket, start: Option<ExecInput>, seat: Seat) -> Result<End> {
    let (sink, source) = socket.split();
    let (control, controls) = mpsc::channel(CONTROL_DEPTH);
    let (input, inputs) = mpsc::channel(INPUT_DEPTH);
    if let Some(start) = start {
        control.try_send(text(&start)).expect("the channel was just made");
    }
    let (left, detached) = oneshot::channel();
    let writer = Task(tokio::spawn(write(sink, controls, inputs)));
    let reader = match seat.input {
        Input::Ours => Some(Task(tokio::spawn(read_stdin(input, seat.detach_keys, left)))),
        Input::Nothing => {
            input.try_send(text(&ExecInput::Eof)).expect("the channel was just made");
            None
        }
        Input::Untouched => None,
    };
    let result = converse(source, control, seat, detached).await;
    drop((writer, reader));
    result
}

/// A task that ends with its owner.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn text(input: &ExecInput) -> Message {
    Message::text(serde_json::to_string(input).expect("messages have text keys only"))
}

// === Out ===

async fn write(
    mut sink: SplitSink<Socket, Message>,
    mut controls: mpsc::Receiver<Message>,
    mut inputs: mpsc::Receiver<Message>,
) {
    let mut alive = tokio::time::interval(ALIVE_EVERY);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            biased;
            Some(control) = controls.recv() => control,
            Some(input) = inputs.recv() => input,
            _ = alive.tick() => Message::Pong(Bytes::new()),
        };
        // The reader sees why the socket is gone.
        if sink.send(message).await.is_err() {
            return;
        }
    }
}

async fn read_stdin(input: mpsc::Sender<Message>, detach_keys: bool, left: oneshot::Sender<()>) {
    let mut stdin = tokio::io::stdin();
    let mut keys = DetachKeys::default();
    loop {
        let mut chunk = BytesMut::with_capacity(INPUT_CHUNK);
        // Input that can't be read is over.
        let read = stdin.read_buf(&mut chunk).await.unwrap_or(0);
        if read == 0 {
            let _ = input.send(text(&ExecInput::Eof)).await;
            return;
        }
        let (bytes, detach) =
            if detach_keys { keys.filter(&chunk) } else { (chunk.freeze(), false) };
        if !bytes.is_empty() && input.send(Message::binary(bytes)).await.is_err() {
            return;
        }
        if detach {
            let _ = left.send(());
            return;
        }
    }
}

/// Finds ctrl-p ctrl-q in what is typed. A ctrl-p is held back until the next key.
#[derive(Debug, Default)]
struct DetachKeys {
    held: bool,
}

impl DetachKeys {
    fn filter(&mut self, typed: &[u8]) -> (Bytes, bool) {
        let mut out = BytesMut::with_capacity(typed.len() + 1);
        for key in typed {
            match (self.held, *key) {
                (true, CTRL_Q) => return (out.freeze(), true),
                (true, CTRL_P) => out.extend_from_slice(&[CTRL_P]),
                (true, other) => {
                    self.held = false;
                    out.extend_from_slice(&[CTRL_P, other]);
                }
                (false, CTRL_P) => self.held = true,
                (false, other) => out.extend_from_slice(&[other]),
            }
        }
        (out.freeze(), false)
    }
}

// === In ===

async fn converse(
    mut source: SplitStream<Socket>,
    control: mpsc::Sender<Message>,
    seat: Seat,
    detached: oneshot::Receiver<()>,
) -> Result<End> {
    let mut signals = Signals::new(seat)?;
    let mut output = Output::new();
    let mut pid = None;
    let mut detached = std::pin::pin!(async {
        match detached.await {
            Ok(()) => (),
            // Input ended without leaving: that will never happen any more.
            Err(_) => std::future::pending().await,
        }
    });
    loop {
        let message = tokio::select! {
            message = source.next() => message,
            () = &mut detached => return Ok(End::Detached { pid }),
            event = signals.next() => {
                signals.handle(event, &control)?;
                continue;
            }
        };
        match read_message(message)? {
            Some(Heard::Bytes(bytes)) => output.write(&bytes).await?,
            Some(Heard::Event(ExecOutput::Started { pid: started })) => pid = Some(started),
            Some(Heard::Event(ExecOutput::Skipped { bytes })) => {
                crate::output::note(&format!("torpor: {bytes} bytes of output were skipped"));
            }
            Some(Heard::Event(ExecOutput::Exited(exit))) => return Ok(End::Exited(exit)),
            Some(Heard::Event(ExecOutput::Error(body))) => {
                return Err(torpor_client::Error::refused(body).into());
            }
            None => (),
        }
    }
}

enum Heard {
    Bytes(Bytes),
    Event(ExecOutput),
}

type Incoming = Option<Result<Message, tokio_tungstenite::tungstenite::Error>>;

fn read_message(message: Incoming) -> Result<Option<Heard>> {
    let early = || Error::failed("the connection ended before the command did");
    match message {
        Some(Ok(Message::Binary(bytes))) => Ok(Some(Heard::Bytes(bytes))),
        Some(Ok(Message::Text(text))) => serde_json::from_str(&text)
            .map(|event| Some(Heard::Event(event)))
            .map_err(|error| Error::garbled("can't read a message of the daemon", error)),
        Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => Ok(None),
        Some(Ok(Message::Close(_))) | None => Err(early()),
        Some(Err(error)) => {
            Err(Error::Failed { message: format!("the connection broke off: {error}"), hint: None })
        }
    }
}

struct Output {
    stdout: Stdout,
    stderr: Stderr,
}

impl Output {
    fn new() -> Self {
        Self { stdout: tokio::io::stdout(), stderr: tokio::io::stderr() }
    }

    async fn write(&mut self, message: &[u8]) -> Result<()> {
        let Some((stream, bytes)) = message.split_first() else { return Ok(()) };
        let written = match *stream {
            STDOUT_BYTE => put(&mut self.stdout, bytes).await,
            STDERR_BYTE => put(&mut self.stderr, bytes).await,
            other => {
                let why = format!("output of stream {other}");
                return Err(Error::garbled("can't read a message of the daemon", why));
            }
        };
        written.map_err(|error| Error::local("write the output", error))
    }
}

/// Flushed at once: what a command says is seen when it says it.
async fn put(to: &mut (impl AsyncWriteExt + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

// === Signals ===

enum Event {
    Interrupt,
    Terminate,
    Resized,
}

/// What the outside world tells us while we sit there.
struct Signals {
    terminal: bool,
    pass_on: bool,
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    resized: Signal,
}

impl Signals {
    fn new(seat: Seat) -> Result<Self> {
        Ok(Self {
            terminal: seat.terminal,
            pass_on: seat.pass_signals,
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
            resized: listen(SignalKind::window_change())?,
        })
    }

    async fn next(&mut self) -> Event {
        tokio::select! {
            _ = self.interrupt.recv() => Event::Interrupt,
            _ = self.terminate.recv() => Event::Terminate,
            _ = self.hangup.recv() => Event::Terminate,
            _ = self.resized.recv() => Event::Resized,
        }
    }

    /// The first signal is passed on, if it may be; a second one ends us (and so the command, unless
    /// it is detachable).
    fn handle(&mut self, event: Event, control: &mpsc::Sender<Message>) -> Result<()> {
        let signal = match event {
            Event::Resized => {
                if self.terminal {
                    // A size that finds no room is followed by a newer one.
                    let _ = control.try_send(text(&ExecInput::Resize(terminal::size())));
                }
                return Ok(());
            }
            Event::Interrupt => SIGINT,
            Event::Terminate => SIGTERM,
        };
        let pass_on = std::mem::take(&mut self.pass_on);
        if pass_on && control.try_send(text(&ExecInput::Signal { signal: signal.into() })).is_ok() {
            return Ok(());
        }
        Err(Error::Exit(128 + signal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detach_keys_are_found_across_reads() {
        let mut keys = DetachKeys::default();
        assert_eq!(keys.filter(b"ls\r"), (Bytes::from_static(b"ls\r"), false));
        assert_eq!(keys.filter(&[b'a', CTRL_P]), (Bytes::from_static(b"a"), false));
        assert_eq!(keys.filter(&[CTRL_Q, b'x']), (Bytes::new(), true));
    }

    #[test]
    fn a_lone_ctrl_p_reaches_the_shell() {
        let mut keys = DetachKeys::default();
        assert_eq!(keys.filter(&[CTRL_P]).0, Bytes::new());
        assert_eq!(keys.filter(&[CTRL_P]).0, Bytes::from_static(&[CTRL_P]));
        assert_eq!(keys.filter(b"k").0, Bytes::from_static(&[CTRL_P, b'k']));
        assert_eq!(keys.filter(b"q").0, Bytes::from_static(b"q"));
    }

    #[test]
    fn the_end_of_the_socket_is_not_the_end_of_the_command() {
        assert!(read_message(None).is_err());
        assert!(read_message(Some(Ok(Message::Close(None)))).is_err());
        assert!(read_message(Some(Ok(Message::text("nonsense")))).is_err());
    }
}
