//! The table "What was tried" of SECURITY.md has a line for every attempt, and no other.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::inside::names_in;
use super::{agent, archives, client, doors, names_of, outgoing, requests, servers};

/// Groups of `tests/guest/hostile_*.py`.
const GROUPS: [&str; 5] = ["kernel", "limits", "agent", "network", "tunnel"];

const LATER: &str = "a_secret_leaves_encrypted_and_does_not_come_back_later";

/// Attempts that are made elsewhere, and the file with the test of this name.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("fork without end", "tests/it/guests.rs", "a_fork_bomb_ends_at_its_limit"),
    ("eat all memory", "tests/it/guests.rs", "who_eats_too_much_memory_is_killed_and_told_so"),
    ("fill the disk", "tests/it/guests.rs", "who_fills_its_disk_gets_an_error_and_lives"),
    ("kill the agent", "tests/it/guests.rs", "who_kills_its_agent_fails_and_says_so"),
    (
        "open ten thousand connections inside",
        "tests/it/guests.rs",
        "ten_thousand_connections_inside_leave_the_agent_well",
    ),
    (
        "become root by sudo without being allowed to",
        "tests/it/sudo.rs",
        "only_members_of_the_group_sudo_become_root",
    ),
    (
        "say a gigabyte that nobody reads",
        "tests/it/run.rs",
        "a_gigabyte_that_nobody_reads_hurts_nobody",
    ),
    (
        "name files by hostile paths",
        "tests/it/files.rs",
        "hostile_paths_are_refused_or_stay_inside",
    ),
    (
        "name snapshots and pools by hostile paths",
        "tests/it/snapshots.rs",
        "hostile_names_reach_nothing",
    ),
    ("change bytes of a snapshot file", "tests/it/snapshots.rs", "a_snapshot_travels_as_one_file"),
    ("change bytes of an image on disk", "tests/it/images.rs", "a_corrupt_image_is_not_booted"),
    (
        "send the head of a request slowly",
        "crates/daemon/tests/it/daemon.rs",
        "who_connects_and_does_not_ask_is_cut_off",
    ),
    (
        "write into the daemon's directories where the umask is 0",
        "tests/it/private.rs",
        "a_daemon_started_without_umask_leaves_nothing_open_and_its_key_to_nobody",
    ),
    ("secret-given-back-later", "tests/it/egress.rs", LATER),
    ("secret-over-plain-http", "tests/it/egress.rs", LATER),
    ("secret-in-a-compressed-answer", "tests/it/egress.rs", LATER),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// As the code names them.
fn made() -> Vec<String> {
    let here = [
        names_of(agent::ATTEMPTS),
        names_of(archives::ATTEMPTS),
        names_of(client::ATTEMPTS),
        names_of(doors::KEYED),
        names_of(doors::OPEN),
        names_of(doors::ALONE),
        names_of(outgoing::ATTEMPTS),
        names_of(requests::ATTEMPTS),
        names_of(servers::ATTEMPTS),
        ELSEWHERE.iter().map(|(name, ..)| *name).collect(),
    ];
    let here = here.concat().into_iter().map(str::to_owned);
    here.chain(GROUPS.iter().flat_map(|group| names_in(group))).collect()
}

#[test]
fn every_attempt_is_in_the_table_and_every_line_is_an_attempt() {
    let text = fs::read_to_string(root().join("SECURITY.md")).unwrap();
    let (_, section) = text.split_once("## What was tried").expect("SECURITY.md has the table");
    let section = section.split("\n## ").next().unwrap();
    let rows: Vec<Vec<&str>> = section
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| attempt |"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    for row in &rows {
        assert_eq!(row.len(), 3, "{row:?}");
        assert!(["guest", "client", "image", "server"].contains(&row[1]), "{row:?}");
        assert!(!row[2].is_empty(), "{row:?}");
    }
    let told: BTreeSet<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(told.len(), rows.len(), "a line is there twice");
    let made = made();
    let made: BTreeSet<&str> = made.iter().map(String::as_str).collect();
    let missing: Vec<_> = made.difference(&told).collect();
    let unknown: Vec<_> = told.difference(&made).collect();
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "not told: {missing:#?}, not made: {unknown:#?}"
    );
}

#[test]
fn attempts_that_are_made_elsewhere_are_there() {
    for (name, file, test) in ELSEWHERE {
        let text = fs::read_to_string(root().join(file)).unwrap();
        assert!(text.contains(&format!("fn {test}")), "{name}: {file} has no {test}");
    }
}

#[test]
fn no_attempt_is_named_twice() {
    let made = made();
    let names: BTreeSet<_> = made.iter().collect();
    assert_eq!(names.len(), made.len());
    assert!(made.len() >= 60, "{}", made.len());
}
