//! Deltas that somebody made up.

use super::*;

const PAGES: u64 = 64;

fn unit(byte: u8) -> UnitId {
    UnitId::from_bytes([byte; ID_BYTES])
}

fn heading(runs: u64, data_pages: u64) -> Heading {
    Heading { unit: unit(1), base: unit(2), memory_bytes: PAGES * PAGE, runs, data_pages }
}

/// A file with a checksum that is right, whatever it is of.
fn made_up(heading: &Heading, runs: &[(u64, u64)], data_pages: u64) -> File {
    let entry = |(first, count): &(u64, u64)| [first.to_le_bytes(), count.to_le_bytes()].concat();
    let entries: Vec<u8> = runs.iter().flat_map(entry).collect();
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&heading.block(&entries), 0).unwrap();
    for page in 0..data_pages {
        file.write_all_at(&[page as u8 + 1; PAGE as usize], (page + 1) * PAGE).unwrap();
    }
    file.write_all_at(&entries, (data_pages + 1) * PAGE).unwrap();
    file
}

/// With a header that fits.
fn indexed(runs: &[(u64, u64)]) -> File {
    let data = runs.iter().filter(|(_, count)| count & ZERO == 0);
    let pages = data.map(|(_, count)| *count).sum();
    made_up(&heading(runs.len() as u64, pages), runs, pages)
}

fn open(file: File) -> Result<Delta, Flaw> {
    Delta::open(file, &unit(1), &unit(2), PAGES * PAGE)
}

fn assert_damaged(file: File, what: &str) {
    match open(file) {
        Err(Flaw::Damaged(_)) => {}
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn the_pages_of_a_delta_come_in_order_and_zeros_without_bytes() {
    let delta = open(indexed(&[(0, 2), (5, 3 | ZERO), (8, 1)])).unwrap();
    let mut seen = Vec::new();
    let read = delta.read(|piece| {
        seen.push(match piece {
            Piece::Data { first_page, bytes } => (first_page, bytes.len() as u64, bytes[0]),
            Piece::Zero(run) => (run.first_page, run.count * PAGE, 0),
        });
        Ok(())
    });
    read.unwrap();
    assert_eq!(seen, [(0, 2 * PAGE, 1), (5, 3 * PAGE, 0), (8, PAGE, 3)]);
}

#[test]
fn an_empty_delta_is_one() {
    let delta = open(indexed(&[])).unwrap();
    delta.read(|piece| panic!("{piece:?}")).unwrap();
}

#[test]
fn runs_that_overlap_or_lead_outside_are_refused() {
    let wrong: [&[(u64, u64)]; 8] = [
        &[(0, 2), (1, 1)],
        &[(5, 1), (4, 1)],
        &[(5, 1), (5, 1)],
        &[(3, 0)],
        &[(PAGES - 1, 2)],
        &[(PAGES, 1)],
        &[(3, ZERO)],
        &[(1, 3 | ZERO), (3, 1)],
    ];
    for runs in wrong {
        assert_damaged(indexed(runs), &format!("{runs:?}"));
    }
    // No bytes are needed to claim that many zeros.
    for count in [PAGES + 1, 1 << 52, !ZERO] {
        assert_damaged(indexed(&[(0, count | ZERO)]), &format!("{count}"));
    }
    assert_damaged(indexed(&[(u64::MAX, 1 | ZERO)]), "the last page of all");
    open(indexed(&[(0, PAGES | ZERO)])).expect("all of it");
}

#[test]
fn absurd_counts_are_refused_before_anything_is_allocated() {
    let absurd = [1, 1 << 20, RUNS_MAX + 1, 1 << 60, u64::MAX / 16, u64::MAX];
    for count in absurd {
        assert_damaged(made_up(&heading(count, 0), &[], 0), &format!("{count} runs"));
        assert_damaged(made_up(&heading(0, count), &[], 0), &format!("{count} pages"));
        assert_damaged(made_up(&heading(count, count), &[], 0), &format!("{count} of both"));
    }
    // The file has the right length, and the index is of fewer pages than are in it.
    assert_damaged(made_up(&heading(1, 3), &[(0, 2)], 3), "a page nobody knows");
    // A sparse file may be as long as it likes.
    let file = made_up(&heading(RUNS_MAX + 1, 0), &[], 0);
    file.set_len(PAGE + (RUNS_MAX + 1) * RUN_BYTES).unwrap();
    assert_damaged(file, "more runs than there can be");
}

#[test]
fn a_delta_of_other_units_or_of_another_memory_is_refused() {
    for (own, base) in [(1, 3), (3, 2), (2, 1)] {
        let heading = Heading { unit: unit(own), base: unit(base), ..heading(0, 0) };
        let found = open(made_up(&heading, &[], 0));
        assert!(matches!(found, Err(Flaw::Mixed(_))), "{own} on {base}: {found:?}");
    }
    let heading = Heading { memory_bytes: 2 * PAGES * PAGE, ..heading(0, 0) };
    assert_damaged(made_up(&heading, &[], 0), "twice the memory");
}

#[test]
fn a_torn_or_longer_delta_is_refused() {
    let whole = || indexed(&[(0, 2), (5, 3 | ZERO), (8, 1)]);
    let size = whole().metadata().unwrap().size();
    open(whole()).unwrap();
    for cut in
        [0, 1, USED as u64, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, size - 16, size - 1, size + 1]
    {
        let file = whole();
        file.set_len(cut).unwrap();
        assert_damaged(file, &format!("{cut} of {size} bytes"));
    }
    // As a crash leaves it: everything but the header.
    let file = whole();
    file.write_all_at(&[0; PAGE as usize], 0).unwrap();
    assert_damaged(file, "no header");
}

#[test]
fn every_changed_byte_of_header_and_index_is_noticed() {
    let whole = || indexed(&[(0, 2), (5, 3 | ZERO), (8, 1)]);
    let size = whole().metadata().unwrap().size();
    for at in (0..USED as u64).chain(size - 48..size) {
        let file = whole();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        assert!(open(file).is_err(), "byte {at}");
    }
}

#[test]
fn small_deltas_are_worth_it_and_large_ones_only_on_larger_memory() {
    let mib = 1024 * 1024;
    assert!(worth_a_delta(34 * mib, 60 * mib), "a session's work on a fresh template");
    assert!(worth_a_delta(100 * mib, 500 * mib));
    assert!(!worth_a_delta(100 * mib, 300 * mib));
    assert!(!worth_a_delta(257 * mib, 1 << 40), "reviving would take too long");
    assert!(worth_a_delta(0, 0));
}
