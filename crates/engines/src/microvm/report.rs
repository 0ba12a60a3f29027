//! Why a QEMU ended, for people.

use crate::host::{REAP_MAX, last_line};
use crate::keeper::{Ended, Keeper};
use crate::limits::Group;
use crate::machines::Record;

/// Waits until it is reaped.
pub(super) async fn reason(keeper: &Keeper, group: &Group, record: &Record) -> String {
    let ended = keeper.exit_of(record.process.pid, REAP_MAX).await.ok().flatten();
    match ended {
        Some(Ended::Signal { signal: libc::SIGKILL }) if group.oom_kills() > 0 => {
            "killed by the host: out of memory".into()
        }
        Some(Ended::Signal { signal }) => format!("killed by the host: signal {signal}"),
        Some(Ended::Code { code: 0 }) => {
            "its kernel stopped: it was shut down or restarted, or it crashed".into()
        }
        Some(Ended::Code { code }) => {
            let tail = keeper.tail(record.id.as_str()).await.unwrap_or_default();
            match last_line(&tail) {
                Some(line) => format!("QEMU ended with exit code {code}: {line}"),
                None => format!("QEMU ended with exit code {code}"),
            }
        }
        None => "ended, nobody knows how".into(),
    }
}
