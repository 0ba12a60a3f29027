//! The processes there are, for people who look at what was saved.

use std::fs;

use torpor_protocol::guest::MAX_PAYLOAD;
use torpor_protocol::snapshot::SavedProcess;

use super::group::Group;

/// More are not told.
const LISTED_MAX: usize = 1000;
/// Room that a process takes in a packet beside its name: names of fields, and four numbers.
const ROOM: usize = 100;

/// The agent, and the members of the group.
pub(super) fn of(group: &Group) -> Vec<SavedProcess> {
    let mut pids = group.pids();
    pids.push(std::process::id());
    described(pids)
}

pub(super) fn all() -> Vec<SavedProcess> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    described(pids.collect())
}

/// By number, as many as fit into one packet.
fn described(mut pids: Vec<u32>) -> Vec<SavedProcess> {
    pids.sort_unstable();
    let mut room = MAX_PAYLOAD;
    let read = |pid| {
        let status = fs::read(format!("/proc/{pid}/status")).ok()?;
        parse(pid, &String::from_utf8_lossy(&status))
    };
    pids.into_iter()
        .filter_map(read)
        .take(LISTED_MAX)
        .take_while(|process| {
            // What is quoted takes two bytes.
            let taken = ROOM + 2 * process.command.len();
            room.checked_sub(taken).map(|left| room = left).is_some()
        })
        .collect()
}

/// None for one that has ended.
fn parse(pid: u32, status: &str) -> Option<SavedProcess> {
    let field = |name: &str| {
        let mut values =
            status.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(":"));
        values.next().map(str::trim)
    };
    let number =
        |name| field(name).and_then(|it| it.split_whitespace().next()?.parse::<u32>().ok());
    if field("State").is_some_and(|state| state.starts_with('Z')) {
        return None;
    }
    let name = field("Name")?;
    Some(SavedProcess {
        pid,
        parent: number("PPid").unwrap_or(0),
        command: name.chars().map(|it| if it.is_control() { '?' } else { it }).collect(),
        user: number("Uid").unwrap_or(0),
        threads: number("Threads").unwrap_or(1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_described_by_its_status() {
        let status =
            "Name:\ta: b\u{1}\nState:\tS (sleeping)\nPPid:\t7\nUid:\t1000\t0\t0\t0\nThreads:\t3\n";
        let expected =
            SavedProcess { pid: 9, parent: 7, command: "a: b?".to_owned(), user: 1000, threads: 3 };
        assert_eq!(parse(9, status), Some(expected));
        assert_eq!(parse(9, "Name:\ta\nState:\tZ (zombie)\n"), None);
        assert_eq!(parse(9, ""), None);
    }

    #[test]
    fn this_process_is_listed_once_and_the_list_fits_into_a_packet() {
        let own = std::process::id();
        let listed = described(vec![own; 3000]);
        assert_eq!(listed.len(), LISTED_MAX);
        assert!(serde_json::to_vec(&listed).unwrap().len() < MAX_PAYLOAD - ROOM);
        assert_eq!(all().iter().filter(|process| process.pid == own).count(), 1);
    }
}
