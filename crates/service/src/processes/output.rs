//! The output of a process, as it comes or as events.
//!
//! Output stays text where it is text: a character that is cut by a packet's end waits for its rest,
//! and only bytes that are no UTF-8 go as base64.

use std::collections::VecDeque;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::Stream as Events;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::guest::{GuestError, Item, Stream, unexpected};
use torpor_lifecycle::{self as lifecycle, Refusal};
use torpor_protocol::api::{ExitReport, OutputStream, RunEvent};
use torpor_protocol::guest::{Exit, ProcessStatus, Reply, Request};
use torpor_protocol::{ErrorCode, State};

use crate::error::{Error, Result};
use crate::processes::Awake;

/// How long the agent may take to start a process.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// How long the driver of a sandbox may take to find out why its machine died.
const REASON_DEADLINE: Duration = Duration::from_secs(5);

/// A process that the agent tells about; dropping it gives the lease back and detaches.
pub struct Output {
    pub started: ProcessStatus,
    pub stream: Stream,
    awake: Awake,
    ooms_before: u64,
    gone: bool,
}

/// What a process said.
pub enum Said {
    Bytes(OutputStream, Bytes),
    Skipped(u64),
    /// What follows was said then, Unix milliseconds; only of those who asked for stamps.
    At(u64),
    Exited(ExitReport),
}

impl Output {
    /// Opens `Run` or `Attach` and waits for the process to be there. `stdin` is all it reads; it
    /// must fit into the window of a stream.
    pub async fn open(awake: Awake, request: &Request, stdin: Option<&str>) -> Result<Self> {
        let ooms_before = awake.lease.meter().oom_kills();
        let mut stream = awake.lease.guest().open(request).await?;
        if let Some(stdin) = stdin {
            let sender = stream.sender();
            sender.send(stdin.as_bytes()).await?;
            sender.finish().await?;
        }
        let reply = tokio::time::timeout(START_DEADLINE, stream.reply()).await;
        let reply = reply.map_err(|_| GuestError::Timeout(START_DEADLINE))??;
        let Reply::Started(started) = reply else { return Err(unexpected(request).into()) };
        Ok(Self { started, stream, awake, ooms_before, gone: false })
    }

    pub fn awake(&self) -> &Awake {
        &self.awake
    }

    /// Cancel-safe. `None` after the end.
    pub async fn next(&mut self) -> Result<Option<Said>> {
        if self.gone {
            return Err(self.why_gone().await);
        }
        let item = match self.stream.next().await {
            Ok(item) => item,
            Err(GuestError::Gone) => {
                // Remembered first: whoever gives up waiting for the reason may ask again.
                self.gone = true;
                return Err(self.why_gone().await);
            }
            Err(GuestError::Asleep) => return Err(self.slept()),
            Err(error) => return Err(error.into()),
        };
        Ok(Some(match item {
            Some(Item::Data(bytes)) => Said::Bytes(OutputStream::Stdout, bytes),
            Some(Item::DataErr(bytes)) => Said::Bytes(OutputStream::Stderr, bytes),
            Some(Item::Reply(Reply::Skipped { bytes })) => Said::Skipped(bytes),
            Some(Item::Reply(Reply::At { ms })) => Said::At(ms),
            Some(Item::Reply(Reply::Exited(status))) => Said::Exited(self.report(&status)),
            Some(Item::Reply(_)) => {
                let what = "an answer that does not belong to a process";
                return Err(GuestError::protocol(what).into());
            }
            Some(Item::End | Item::Reset) | None => return Ok(None),
        }))
    }

    fn report(&self, status: &ProcessStatus) -> ExitReport {
        let exit = status.exit.unwrap_or(Exit::Code { code: 0 });
        let well = exit == Exit::Code { code: 0 };
        ExitReport::new(exit, !well && self.starved())
    }

    /// Whether the host killed something in the sandbox since the process was opened.
    pub fn starved(&self) -> bool {
        self.awake.lease.meter().oom_kills() > self.ooms_before
    }

    /// The machine died; its driver is about to say why.
    async fn why_gone(&self) -> Error {
        if self.starved() {
            return Error::with_hint(
                ErrorCode::SandboxFailed,
                "the sandbox used up its memory and was killed",
                "create it with more memory_mib",
            );
        }
        let mut status = self.awake.sandbox.watch();
        let changed = status.wait_for(|status| status.state != State::Running);
        // What is awaited next must not find the status locked.
        let state = match tokio::time::timeout(REASON_DEADLINE, changed).await {
            Ok(Ok(status)) => status.state,
            Ok(Err(_)) | Err(_) => return GuestError::Gone.into(),
        };
        let id = self.awake.sandbox.id().to_string();
        match state {
            State::Failed => match self.awake.sandbox.awake().await {
                Ok(_) => GuestError::Gone.into(),
                Err(error) => error.into(),
            },
            State::Terminated => lifecycle::Error::from(Refusal::Terminated(id)).into(),
            State::Asleep => self.slept(),
            State::Creating | State::Running => GuestError::Gone.into(),
        }
    }

    /// Somebody put the sandbox to sleep; what ran in it still does when it is awake.
    fn slept(&self) -> Error {
        let (id, pid) = (self.awake.sandbox.id(), self.started.pid);
        Error::with_hint(
            ErrorCode::SandboxAsleep,
            format!(
                "sandbox {id} was put to sleep; process {pid} is kept: GET \
                 /v1/sandboxes/{id}/processes/{pid}/attach wakes it and goes on"
            ),
            format!("`torpor attach {id} {pid}` wakes it and goes on"),
        )
    }

    /// All of it as events, until it ends or `until` is cancelled.
    pub fn into_events(self, until: CancellationToken) -> impl Events<Item = RunEvent> + Send {
        let started =
            RunEvent::Started { pid: self.started.pid, started_at_ms: self.started.started_at_ms };
        let lines = Lines {
            output: self,
            until,
            due: VecDeque::from([started]),
            stdout: Text::default(),
            stderr: Text::default(),
            over: false,
        };
        futures_util::stream::unfold(lines, async |mut lines| {
            let event = lines.next().await?;
            Some((event, lines))
        })
    }
}

struct Lines {
    output: Output,
    until: CancellationToken,
    due: VecDeque<RunEvent>,
    stdout: Text,
    stderr: Text,
    over: bool,
}

impl Lines {
    async fn next(&mut self) -> Option<RunEvent> {
        loop {
            if let Some(event) = self.due.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            let said = tokio::select! {
                biased;
                said = self.output.next() => said,
                () = self.until.cancelled() => {
                    Err(Error::from(lifecycle::Error::from(Refusal::Stopping)))
                }
            };
            self.take(said);
        }
    }

    fn take(&mut self, said: Result<Option<Said>>) {
        match said {
            Ok(Some(Said::Bytes(stream, bytes))) => {
                let text = match stream {
                    OutputStream::Stdout => &mut self.stdout,
                    OutputStream::Stderr => &mut self.stderr,
                };
                self.due.extend(text.push(stream, &bytes));
            }
            Ok(Some(Said::At(_))) => {}
            Ok(Some(Said::Skipped(bytes))) => {
                self.flush();
                self.due.push_back(RunEvent::Skipped { bytes });
            }
            Ok(Some(Said::Exited(exit))) => {
                self.flush();
                self.due.push_back(RunEvent::Exited { exit });
            }
            Ok(None) => {
                self.flush();
                self.over = true;
            }
            Err(error) => {
                self.flush();
                self.due.push_back(RunEvent::Error { message: error.to_body("").message });
                self.over = true;
            }
        }
    }

    fn flush(&mut self) {
        self.due.extend(self.stdout.flush(OutputStream::Stdout));
        self.due.extend(self.stderr.flush(OutputStream::Stderr));
    }
}

/// Keeps the beginning of a character until its end is there.
#[derive(Default)]
struct Text {
    /// At most three bytes.
    begun: Vec<u8>,
}

impl Text {
    fn push(&mut self, stream: OutputStream, bytes: &[u8]) -> Option<RunEvent> {
        let mut whole = std::mem::take(&mut self.begun);
        whole.extend_from_slice(bytes);
        if let Err(error) = std::str::from_utf8(&whole)
            && error.error_len().is_none()
        {
            self.begun = whole.split_off(error.valid_up_to());
        }
        (!whole.is_empty()).then(|| event(stream, whole))
    }

    fn flush(&mut self, stream: OutputStream) -> Option<RunEvent> {
        let rest = std::mem::take(&mut self.begun);
        (!rest.is_empty()).then(|| event(stream, rest))
    }
}

fn event(stream: OutputStream, bytes: Vec<u8>) -> RunEvent {
    match String::from_utf8(bytes) {
        Ok(text) => RunEvent::Output { stream, text: Some(text), base64: None },
        Err(error) => {
            let base64 = Some(STANDARD.encode(error.as_bytes()));
            RunEvent::Output { stream, text: None, base64 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(event: Option<RunEvent>) -> String {
        match event {
            Some(RunEvent::Output { text: Some(text), .. }) => text,
            Some(RunEvent::Output { base64: Some(base64), .. }) => format!("base64:{base64}"),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn a_character_that_is_cut_in_two_stays_text() {
        let mut text = Text::default();
        let bytes = "aä€".as_bytes();
        assert_eq!(text_of(text.push(OutputStream::Stdout, &bytes[..2])), "a");
        assert_eq!(text_of(text.push(OutputStream::Stdout, &bytes[2..4])), "ä");
        assert_eq!(text_of(text.push(OutputStream::Stdout, &bytes[4..])), "€");
        assert_eq!(text.flush(OutputStream::Stdout), None);
    }

    #[test]
    fn bytes_that_are_no_text_are_not_lost() {
        let mut text = Text::default();
        assert_eq!(text_of(text.push(OutputStream::Stdout, &[0xff, 0xfe])), "base64://4=");
        assert_eq!(text.push(OutputStream::Stdout, &[0xe2]), None);
        assert_eq!(text_of(text.flush(OutputStream::Stdout)), "base64:4g==");
    }
}
