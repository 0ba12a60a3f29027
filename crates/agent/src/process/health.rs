//! Looks at a process from time to time, to see whether it is well.
//!
//! A look is a connection to its port on loopback, and the first line of an answer if it is asked for a
//! path. Looks follow one another, never at once, and a machine that slept had no time to answer: a
//! pause it slept through is begun anew, a look it slept or was quiesced through says nothing.

use std::future::pending;
use std::io;
use std::time::Duration;

use tokio::io::Interest;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use torpor_protocol::guest::{Failure, FailureCode, HealthCheck, HealthReport, HealthState};

use super::Process;
use crate::descriptor::Descriptor;
use crate::failure::failure;
use crate::ports;
use crate::quiesce::Quiesce;

/// Longest delay and longest interval: whoever wants to wait longer wants no look.
const PAUSE_MAX_MS: u64 = 24 * 60 * 60 * 1000;
/// Longest look: nothing on loopback takes longer and is well.
const TIMEOUT_MAX_MS: u64 = 10 * 60 * 1000;
/// Longest path: what servers take at least.
const PATH_MAX: usize = 2048;
/// Shortest pause between looks: a process shall not be busy being looked at, and each look takes a
/// port for a while.
const MIN_PAUSE: Duration = Duration::from_millis(10);
/// A timer that is later than this was late because the machine slept, or could hardly run.
const SLEPT: Duration = Duration::from_secs(1);
/// Longest first line of an answer.
const STATUS_LINE_MAX: usize = 512;
/// How much of the rest of an answer is read and thrown away. A server whose answer nobody takes would
/// complain about it with every look.
const REST_MAX: usize = 64 * 1024;
/// Statuses from here on say that it is not well.
const NOT_WELL_STATUS: u16 = 400;

/// Refuses what can't be done.
pub(super) fn validate(check: &HealthCheck) -> Result<(), Failure> {
    let invalid = |message: String| Err(failure(FailureCode::Invalid, message));
    if check.port == 0 {
        return invalid("a health check needs a port".to_owned());
    }
    for (what, ms, least, most) in [
        ("initial delay", check.initial_delay_ms, 0, PAUSE_MAX_MS),
        ("interval", check.interval_ms, 1, PAUSE_MAX_MS),
        ("timeout", check.timeout_ms, 1, TIMEOUT_MAX_MS),
    ] {
        if !(least..=most).contains(&ms) {
            return invalid(format!("the {what} of a health check is {least} to {most} ms"));
        }
    }
    if check.failure_threshold == 0 {
        return invalid("the failure threshold of a health check is at least 1".to_owned());
    }
    let Some(path) = &check.path else { return Ok(()) };
    if !path.starts_with('/') {
        return invalid("the path of a health check begins with /".to_owned());
    }
    if path.len() > PATH_MAX {
        return invalid(format!("the path of a health check has at most {PATH_MAX} bytes"));
    }
    if path.chars().any(|letter| letter.is_control() || letter.is_whitespace()) {
        return invalid("the path of a health check holds no spaces or control characters".into());
    }
    Ok(())
}

/// What is said of a process that nobody looked at yet.
pub(super) const STARTING: HealthReport =
    HealthReport { state: HealthState::Starting, failures: 0 };

/// What is said after one more look.
fn judged(check: &HealthCheck, before: HealthReport, well: bool) -> HealthReport {
    if well {
        return HealthReport { state: HealthState::Healthy, failures: 0 };
    }
    let failures = before.failures.saturating_add(1);
    let over = failures >= check.failure_threshold;
    HealthReport { state: if over { HealthState::Unhealthy } else { before.state }, failures }
}

/// Looks at a process, if that was asked for; returns when it is not well. Dropped at its end.
pub(super) async fn until_unwell(state: &Quiesce, process: &Process) {
    let health = process.spec.supervise.as_ref().and_then(|it| it.health.as_ref());
    let Some(check) = health else { return pending().await };
    pause(Duration::from_millis(check.initial_delay_ms)).await;
    let limit = Duration::from_millis(check.timeout_ms);
    loop {
        state.unquiesced().await;
        let (began, count) = (Instant::now(), state.count());
        let answer = timeout(limit, ask(check)).await;
        let well = matches!(answer, Ok(Ok((_, true))));
        if process.state.borrow().order.is_some() {
            // It is being stopped, and need not be well while it ends.
            drop(answer);
            return pending().await;
        }
        if well || (began.elapsed() < limit + SLEPT && state.count() == count) {
            let before = process.state.borrow().health.unwrap_or(STARTING);
            let report = judged(check, before, well);
            process.state.borrow_mut().health = Some(report);
            if report.state == HealthState::Unhealthy {
                return;
            }
        }
        if let Ok(Ok((connection, _))) = answer {
            // Whether there is an end to it says nothing.
            let _ = timeout(limit, hang_up(check, connection)).await;
        }
        pause(Duration::from_millis(check.interval_ms).max(MIN_PAUSE)).await;
    }
}

/// Waits for so long while the machine is awake.
async fn pause(length: Duration) {
    let due = Instant::now() + length;
    sleep_until(due).await;
    if due.elapsed() > SLEPT {
        // Once: a machine that can hardly run is looked at nevertheless.
        sleep(length).await;
    }
}

// === One look ===

/// Whether it is well, and the connection that it said so on.
async fn ask(check: &HealthCheck) -> io::Result<(Descriptor, bool)> {
    let connection = ports::dial(check.port).await?;
    let Some(path) = &check.path else { return Ok((connection, true)) };
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost:{}\r\nUser-Agent: torpor\r\nAccept: */*\r\n\
         Connection: close\r\n\r\n",
        check.port
    );
    connection.write_all(request.as_bytes()).await?;
    let line = status_line(&connection).await?;
    Ok((connection, status(&line).is_some_and(|status| status < NOT_WELL_STATUS)))
}

/// The first line of an answer, and maybe more, as far as there is one.
async fn status_line(connection: &Descriptor) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut room = [0; STATUS_LINE_MAX];
    while !line.contains(&b'\n') && line.len() < STATUS_LINE_MAX {
        match read(connection, &mut room).await? {
            0 => break,
            length => line.extend_from_slice(&room[..length]),
        }
    }
    Ok(line)
}

/// `HTTP/1.1 200 …`
fn status(line: &[u8]) -> Option<u16> {
    let line = line.split(|byte| matches!(byte, b'\r' | b'\n')).next()?;
    let mut words = line.strip_prefix(b"HTTP/")?.split(|byte| *byte == b' ');
    let (_version, status) = (words.next()?, words.next()?);
    let digits = status.len() == 3 && status.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(status).ok().filter(|_| digits)?.parse().ok()
}

async fn hang_up(check: &HealthCheck, connection: Descriptor) -> io::Result<()> {
    let mut room = [0; STATUS_LINE_MAX];
    let mut rest = if check.path.is_some() { REST_MAX } else { 0 };
    while rest > 0 {
        match read(&connection, &mut room).await? {
            0 => break,
            length => rest = rest.saturating_sub(length),
        }
    }
    Ok(())
}

async fn read(connection: &Descriptor, room: &mut [u8]) -> io::Result<usize> {
    let once = |socket: &std::os::fd::OwnedFd| Ok(rustix::io::read(socket, &mut *room)?);
    connection.async_io(Interest::READABLE, once).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check() -> HealthCheck {
        HealthCheck {
            port: 80,
            path: Some("/health?a=b".into()),
            initial_delay_ms: 0,
            interval_ms: 1,
            timeout_ms: 1,
            failure_threshold: 2,
        }
    }

    #[test]
    fn a_check_that_makes_no_sense_is_refused() {
        assert_eq!(validate(&check()), Ok(()));
        assert_eq!(validate(&HealthCheck { path: None, ..check() }), Ok(()));
        let path = |path: &str| HealthCheck { path: Some(path.to_owned()), ..check() };
        for (wrong, message) in [
            (HealthCheck { port: 0, ..check() }, "port"),
            (HealthCheck { initial_delay_ms: PAUSE_MAX_MS + 1, ..check() }, "initial delay"),
            (HealthCheck { interval_ms: 0, ..check() }, "interval"),
            (HealthCheck { interval_ms: u64::MAX, ..check() }, "interval"),
            (HealthCheck { timeout_ms: 0, ..check() }, "timeout"),
            (HealthCheck { timeout_ms: TIMEOUT_MAX_MS + 1, ..check() }, "timeout"),
            (HealthCheck { failure_threshold: 0, ..check() }, "failure threshold"),
            (path(""), "begins with /"),
            (path("health"), "begins with /"),
            (path("/a\r\nX: y"), "control characters"),
            (path("/a b"), "spaces"),
            (path(&format!("/{}", "a".repeat(PATH_MAX))), "bytes"),
        ] {
            let failed = validate(&wrong).unwrap_err();
            assert_eq!(failed.code, FailureCode::Invalid);
            assert!(failed.message.contains(message), "{} / {message}", failed.message);
        }
    }

    #[test]
    fn only_failures_in_a_row_make_it_unhealthy() {
        let mut report = STARTING;
        let mut seen = Vec::new();
        for well in [false, true, false, true, false, false] {
            report = judged(&check(), report, well);
            seen.push((report.state, report.failures));
        }
        use HealthState::{Healthy, Starting, Unhealthy};
        let expected =
            [(Starting, 1), (Healthy, 0), (Healthy, 1), (Healthy, 0), (Healthy, 1), (Unhealthy, 2)];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_status_is_read_from_the_first_line_only() {
        assert_eq!(status(b"HTTP/1.1 200 OK\r\nX: 500\r\n"), Some(200));
        assert_eq!(status(b"HTTP/1.0 404\r\n"), Some(404));
        assert_eq!(status(b"HTTP/1.1 503 "), Some(503));
        let nonsense = [
            &b""[..],
            b"200",
            b"HTTP/1.1",
            b"HTTP/1.1 ",
            b"HTTP/1.1 20",
            b"HTTP/1.1 +20",
            b"SSH-2.0 200 ",
            b"HTTP/1.1\r\n200",
        ];
        for nonsense in nonsense {
            assert_eq!(status(nonsense), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_begun_anew_after_a_sleep() {
        let began = Instant::now();
        let paused = pause(Duration::from_secs(10));
        tokio::pin!(paused);
        tokio::select! {
            () = &mut paused => panic!("too early"),
            () = sleep(Duration::from_secs(1)) => {}
        }
        tokio::time::advance(Duration::from_secs(3600)).await;
        paused.await;
        assert_eq!(began.elapsed().as_secs(), 1 + 3600 + 10);
        let began = Instant::now();
        pause(Duration::from_secs(10)).await;
        assert_eq!(began.elapsed().as_secs(), 10);
    }
}
