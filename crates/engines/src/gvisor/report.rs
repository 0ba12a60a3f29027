//! Why a sandbox of runsc ended, for people.

use std::io::Read;

use torpor_protocol::Excerpt;

use super::layout::MachineDir;
use crate::host::{REAP_MAX, last_line};
use crate::keeper::{Ended, Keeper};
use crate::limits::Group;
use crate::machines::Record;

/// How much of a crash report is read: the reason stands at its head.
const PANIC_MAX: u64 = 64 * 1024;

/// Waits until it is reaped.
pub(super) async fn reason(
    keeper: &Keeper,
    dir: &MachineDir,
    group: &Group,
    record: &Record,
) -> String {
    let ended = keeper.exit_of(record.process.pid, REAP_MAX).await.ok().flatten();
    let report = crash_report(dir);
    let killed = ended == Some(Ended::Signal { signal: libc::SIGKILL });
    if killed && group.oom_kills() > 0 {
        return "killed by the host: out of memory".into();
    }
    let no_thread = ["failed to get clone", "createSysmsgThread", "failed to create new OS thread"];
    if no_thread.iter().any(|words| report.contains(words)) {
        return "crashed: process limit reached (pids.max)".into();
    }
    if let Some(line) = report.lines().find(|line| !line.trim().is_empty()) {
        return format!("crashed: {}", Excerpt::from(line.trim()));
    }
    match ended {
        Some(Ended::Signal { signal }) => format!("killed by the host: signal {signal}"),
        // As shells tell a signal.
        Some(Ended::Code { code }) if code > 128 => {
            format!("agent was killed: signal {}", code - 128)
        }
        Some(Ended::Code { code }) => {
            let tail = keeper.tail(record.id.as_str()).await.unwrap_or_default();
            match last_line(&tail) {
                Some(line) => format!("agent exited with {code}: {line}"),
                None => format!("agent exited with {code}"),
            }
        }
        None => "ended, nobody knows how".into(),
    }
}

/// What the sandbox's kernel wrote when it crashed.
fn crash_report(dir: &MachineDir) -> String {
    let mut report = Vec::new();
    if let Ok(file) = std::fs::File::open(&dir.panic_log) {
        let _ = file.take(PANIC_MAX).read_to_end(&mut report);
    }
    String::from_utf8_lossy(&report).into_owned()
}
