//! Whether an instance can answer: a connection to its port, or a request with an answer below 400. What the guest
//! says is read within limits.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::{Lease, Sandbox, wake_deadline};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{ExitReport, Process};
use torpor_protocol::guest::{FailureCode, Reply, Request};
use torpor_protocol::hosting::{PROCESS_NAME, Revision};

use crate::Service;
use crate::error::{Error, Result};
use crate::processes::{self, Awake, ProcessRef};

/// Between two looks, at first and later.
const STEPS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// What a wake may take besides.
pub(super) const SLACK: Duration = Duration::from_secs(180);
/// How long one answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// How much of an answer is looked at: its first line.
const LINE_MAX: usize = 256;

/// Whether a program that ends is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// It never ran: who deploys wants to know now.
    FirstRun,
    /// It is started again.
    Restarts,
}

/// Returns when it is healthy. It stays awake meanwhile.
pub(super) async fn until_healthy(
    app: &Service,
    sandbox: &Sandbox,
    revision: &Revision,
    patience: Patience,
) -> Result<()> {
    let end = Instant::now() + Duration::from_millis(revision.health.timeout_ms);
    let mut pause = STEPS.0;
    loop {
        let lease = app.fleet.awake(sandbox, wake_deadline()).await?;
        let Err(why) = once(&lease, revision).await else { return Ok(()) };
        if patience == Patience::FirstRun && !revision.command.is_empty() {
            expect_running(sandbox, lease).await?;
        }
        if Instant::now() + pause > end {
            let limit = Duration::from_millis(revision.health.timeout_ms);
            let message = format!("it was not healthy within {limit:?}: {why}");
            return Err(Error::new(ErrorCode::Timeout, message));
        }
        sleep(pause).await;
        pause = (pause * 2).min(STEPS.1);
    }
}

/// Whether it is healthy now; why not, for people.
pub(super) async fn once(lease: &Lease, revision: &Revision) -> std::result::Result<(), String> {
    let answer = timeout(ANSWER, ask(lease, revision)).await;
    answer.unwrap_or_else(|_| Err(format!("it did not answer within {ANSWER:?}")))
}

async fn expect_running(sandbox: &Sandbox, lease: Lease) -> Result<()> {
    let awake = Awake { sandbox: sandbox.clone(), lease };
    let process = processes::find(&awake, &ProcessRef::Name(PROCESS_NAME.to_owned())).await?;
    let Process { exit, last_exit, .. } = process;
    let Some(exit) = exit.or(last_exit) else { return Ok(()) };
    Err(Error::new(ErrorCode::CommandFailed, format!("the program {}", ended(&exit))))
}

fn ended(exit: &ExitReport) -> String {
    match (exit.exit_code, exit.signal) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

async fn ask(lease: &Lease, revision: &Revision) -> std::result::Result<(), String> {
    let port = revision.port.get();
    let explain = |error: GuestError| match error {
        GuestError::Refused { code: FailureCode::NotListening, .. } => {
            format!("nothing listens on port {port}")
        }
        GuestError::Refused { .. }
        | GuestError::Gone
        | GuestError::Asleep
        | GuestError::Protocol(_)
        | GuestError::Timeout(_) => error.to_string(),
    };
    let mut stream = lease.guest().open(&Request::Connect { port }).await.map_err(explain)?;
    if stream.reply().await.map_err(explain)? != Reply::Done {
        return Err("the agent did not connect".to_owned());
    }
    let Some(path) = &revision.health.path else { return Ok(()) };
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: localhost:{port}\r\nuser-agent: torpor\r\naccept: */*\r\n\
         connection: close\r\n\r\n"
    );
    stream.sender().send(request.as_bytes()).await.map_err(explain)?;
    let mut line = Vec::new();
    while !line.contains(&b'\n') && line.len() < LINE_MAX {
        let Some(bytes) = stream.data().await.map_err(explain)? else { break };
        line.extend_from_slice(&bytes[..bytes.len().min(LINE_MAX)]);
    }
    match status_of(&line) {
        Some(status) if status < 400 => Ok(()),
        Some(status) => Err(format!("GET {path} was answered with {status}")),
        None => Err(format!("what listens on port {port} does not speak HTTP")),
    }
}

/// The status in the first line of an answer.
fn status_of(line: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(line.split(|byte| *byte == b'\n').next()?).ok()?;
    let mut words = line.split_ascii_whitespace();
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    words.next().filter(|status| status.len() == 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_an_answer_is_in_its_first_line() {
        for (line, status) in [
            ("HTTP/1.1 204 No Content\r\nx: y", Some(204)),
            ("HTTP/1.0 500\r\n", Some(500)),
            ("HTTP/2 200\r\n", None),
            ("SSH-2.0-x\r\n", None),
            ("", None),
            ("HTTP/1.1 20", None),
        ] {
            assert_eq!(status_of(line.as_bytes()), status, "{line:?}");
        }
        assert_eq!(status_of(&[0xff, 0xfe]), None);
    }
}
