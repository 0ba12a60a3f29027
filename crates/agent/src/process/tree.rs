//! Kills a process with everything it started.
//!
//! A process leads its own session, so what it started is found by session, by process group or by
//! parent, in `/proc`. Whoever left the session and lost its parent before anybody looked is a
//! daemon in its own right and lives on.

use std::collections::HashSet;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// How often to look again for what was forked between looking and killing.
const LOOKS: u32 = 60;
/// The pause between looks grows up to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// One line of the process list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    pid: u32,
    state: u8,
    parent: u32,
    group: u32,
    session: u32,
}

impl Entry {
    fn dead(self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// Kills the session that `root` leads and all descendants; returns when nothing of it is left, or
/// after some seconds. `reaped` says that `root` itself is gone already.
pub(crate) async fn kill(root: u32, reaped: bool) {
    if !reaped {
        return kill_all(&[root]).await;
    }
    let entries = entries();
    // The number of a session that lives is given to nobody else. So if somebody has it, the session is
    // gone and that is a stranger.
    if root > 1 && !entries.iter().any(|entry| entry.pid == root) {
        let mut known = HashSet::from([root]);
        kill_each(&add_relatives(&mut known, &entries));
        kill_rest(known).await;
    }
}

/// `kill`, for many of whom nobody was reaped: one look at the list is for all of them.
pub(crate) async fn kill_all(roots: &[u32]) {
    let mut known: HashSet<u32> = roots.iter().copied().filter(|root| *root > 1).collect();
    let leader = |root: &u32| Pid::from_raw(root.cast_signed());
    let leaders: Vec<Pid> = known.iter().filter_map(leader).collect();
    for leader in &leaders {
        // Stopped, they can't fork; and they stay the parents by which their children are found.
        let _ = kill_process_group(*leader, Signal::STOP);
    }
    kill_each(&add_relatives(&mut known, &entries()));
    for leader in &leaders {
        // Also where there is no list to search.
        let _ = kill_process_group(*leader, Signal::KILL);
    }
    kill_rest(known).await;
}

/// Looks again, until nothing of them is left.
async fn kill_rest(mut known: HashSet<u32>) {
    for look in 0..LOOKS {
        tokio::time::sleep(Duration::from_millis(1 << look.min(6)).min(LONGEST_PAUSE)).await;
        let living = add_relatives(&mut known, &entries());
        if living.is_empty() {
            return;
        }
        kill_each(&living);
    }
}

/// Waits until nobody is left of the process group that `leader` led, who was reaped.
pub(crate) async fn group_gone(leader: u32) {
    let mut pause = Duration::from_millis(1);
    loop {
        let entries = entries();
        // Who has its number now is a stranger, so the group is gone.
        let stranger = entries.iter().any(|entry| entry.pid == leader);
        if stranger || !entries.iter().any(|entry| entry.group == leader && !entry.dead()) {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

fn kill_each(living: &[u32]) {
    for pid in living.iter().filter_map(|pid| Pid::from_raw(pid.cast_signed())) {
        // Who is gone meanwhile is gone.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Adds to `known` all that belong to somebody in it; returns those that live.
fn add_relatives(known: &mut HashSet<u32>, entries: &[Entry]) -> Vec<u32> {
    loop {
        let before = known.len();
        for entry in entries {
            let relatives = [entry.parent, entry.group, entry.session];
            if relatives.iter().any(|relative| known.contains(relative)) {
                known.insert(entry.pid);
            }
        }
        if known.len() == before {
            break;
        }
    }
    let living = entries.iter().filter(|entry| known.contains(&entry.pid) && !entry.dead());
    living.map(|entry| entry.pid).collect()
}

fn entries() -> Vec<Entry> {
    let own = std::process::id();
    let Ok(directory) = std::fs::read_dir("/proc") else { return Vec::new() };
    directory
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| *pid != own)
        .filter_map(|pid| parse(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
        .collect()
}

/// `pid (name) state parent group session …`, where the name may hold anything.
fn parse(stat: &[u8]) -> Option<Entry> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let name_start = stat.iter().position(|byte| *byte == b'(')?;
    let pid = std::str::from_utf8(&stat[..name_start]).ok()?.trim().parse().ok()?;
    let mut fields = std::str::from_utf8(&stat[name_end + 1..]).ok()?.split_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let mut number = || fields.next()?.parse::<i64>().ok()?.try_into().ok();
    Some(Entry { pid, state, parent: number()?, group: number()?, session: number()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_full_of_brackets_hides_nothing() {
        let entry = parse(b"12 (a) S (b) (c)) R 3 4 5 0 -1 0\n").unwrap();
        assert_eq!(entry, Entry { pid: 12, state: b'R', parent: 3, group: 4, session: 5 });
        assert_eq!(parse(b"12 (short"), None);
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn relatives_are_found_by_parent_group_and_session() {
        let entry =
            |pid, parent, group, session| Entry { pid, state: b'S', parent, group, session };
        let list = [
            entry(10, 1, 10, 10),
            entry(11, 10, 11, 11),
            entry(12, 11, 12, 12),
            entry(13, 1, 13, 10),
            entry(20, 1, 20, 20),
        ];
        let mut known = HashSet::from([10]);
        assert_eq!(add_relatives(&mut known, &list), [10, 11, 12, 13]);
    }
}
