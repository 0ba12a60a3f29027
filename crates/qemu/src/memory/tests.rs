//! The pages of a real process, and of files that lie.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::guest::{Child, Guest, Mapped};
use super::maps::Mapping;
use super::*;

const PAGES: u64 = 1024;

/// A file of [`PAGES`] pages; some have data.
fn file() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGES * PAGE).unwrap();
    for page in [0, 1, 7, 500] {
        file.write_all_at(&[0xaa; PAGE_BYTES], page * PAGE).unwrap();
    }
    file
}

fn run(first_page: u64, count: u64) -> Run {
    Run { first_page, count }
}

/// Data as first page and bytes, zeros as runs.
fn copied(memory: &GuestMemory, runs: &[Run]) -> (Vec<(u64, Vec<u8>)>, Vec<Run>) {
    let (mut data, mut zero) = (Vec::new(), Vec::new());
    let taken = memory.copy_out(runs, |piece| {
        match piece {
            Piece::Data { first_page, bytes } => data.push((first_page, bytes.to_vec())),
            Piece::Zero(run) => zero.push(run),
        }
        Ok(())
    });
    taken.unwrap();
    (data, zero)
}

#[test]
fn what_was_written_is_found_and_nothing_else() {
    let file = file();
    let guest = Guest::new(&file, PAGES * PAGE, &[(1, 1), (2, 2), (9, 9), (PAGES - 1, 3)]);
    let found = guest.memory.written().unwrap();
    assert_eq!(found, [run(1, 2), run(9, 1), run(PAGES - 1, 1)], "page 0 was read only");
    assert_eq!(bytes_of(&found), 4 * PAGE);
    let quiet = Guest::new(&file, PAGES * PAGE, &[]);
    assert_eq!(quiet.memory.written().unwrap(), []);
}

#[test]
fn written_pages_are_copied_and_those_of_zeros_only_named() {
    let file = file();
    let writes = [(0, 0), (1, 1), (2, 2), (3, 0), (4, 0), (9, 9)];
    let guest = Guest::new(&file, PAGES * PAGE, &writes);
    let written = guest.memory.written().unwrap();
    assert_eq!(written, [run(0, 5), run(9, 1)]);
    let (data, zero) = copied(&guest.memory, &written);
    let two = [[1; PAGE_BYTES], [2; PAGE_BYTES]].concat();
    assert_eq!(data, [(1, two), (9, vec![9; PAGE_BYTES])]);
    assert_eq!(zero, [run(0, 1), run(3, 2)]);
}

#[test]
fn a_run_longer_than_the_buffer_is_copied_whole() {
    let file = file();
    let writes: Vec<(u64, u8)> = (3..700).map(|page| (page, (page % 250) as u8 + 1)).collect();
    let guest = Guest::new(&file, PAGES * PAGE, &writes);
    let written = guest.memory.written().unwrap();
    assert_eq!(written, [run(3, 697)]);
    let (data, zero) = copied(&guest.memory, &written);
    assert!(data.len() > 1 && zero.is_empty());
    let mut page = 3;
    for (first_page, bytes) in data {
        assert_eq!(first_page, page);
        for content in bytes.as_chunks::<PAGE_BYTES>().0 {
            assert_eq!(*content, [(page % 250) as u8 + 1; PAGE_BYTES]);
            page += 1;
        }
    }
    assert_eq!(page, 700);
}

#[test]
fn a_swapped_page_counts_and_a_page_of_the_file_does_not() {
    let (present, swapped, of_file) = (1 << 63, 1 << 62, 1 << 61);
    assert!(scan::is_written(present) && scan::is_written(swapped | 12345));
    assert!(!scan::is_written(present | of_file), "the file's page");
    assert!(!scan::is_written(swapped | of_file), "the file's page, on its way elsewhere");
    assert!(!scan::is_written(0) && !scan::is_written(1 << 55), "never touched");
}

#[test]
fn pages_that_can_not_be_there_are_not_read() {
    let file = file();
    let guest = Guest::new(&file, PAGES * PAGE, &[]);
    let wrong: [&[Run]; 5] = [
        &[run(PAGES, 1)],
        &[run(PAGES - 1, 2)],
        &[run(0, 0)],
        &[run(u64::MAX, 2)],
        &[run(5, 2), run(6, 1)],
    ];
    for runs in wrong {
        let error = guest.memory.copy_out(runs, |_| Ok(())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{runs:?}");
    }
}

#[test]
fn only_one_private_mapping_of_the_right_file_and_size_will_do() {
    let (file, bytes) = (file(), PAGES * PAGE);
    let refused = |child: &Child, file: &File, bytes: u64| {
        let error = GuestMemory::of(child.pid, file, bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    };
    let child = Child::new(&file, bytes, Mapped::Privately, &[]);
    GuestMemory::of(child.pid, &file, bytes).unwrap();
    refused(&child, &file, bytes - PAGE);
    refused(&child, &file, bytes + PAGE);
    refused(&child, &tempfile::tempfile().unwrap(), bytes);
    refused(&Child::new(&file, bytes, Mapped::Shared, &[]), &file, bytes);
    refused(&Child::new(&file, bytes, Mapped::Twice, &[]), &file, bytes);
}

#[test]
fn the_memory_of_a_process_that_ended_is_an_error_and_never_that_of_another() {
    let file = file();
    let child = Child::new(&file, PAGES * PAGE, Mapped::Privately, &[(3, 3)]);
    let memory = GuestMemory::of(child.pid, &file, PAGES * PAGE).unwrap();
    let pid = child.pid;
    drop(child);
    assert!(memory.copy_out(&[run(3, 1)], |_| Ok(())).is_err());
    assert!(memory.written().is_err());
    assert!(memory.write(3, &[1; PAGE_BYTES]).is_err());
    assert!(GuestMemory::of(pid, &file, PAGES * PAGE).is_err());
}

#[test]
fn an_error_of_the_taker_ends_the_copy() {
    let file = file();
    let guest = Guest::new(&file, PAGES * PAGE, &[(1, 1), (5, 5)]);
    let mut taken = 0;
    let result = guest.memory.copy_out(&guest.memory.written().unwrap(), |_| {
        taken += 1;
        Err(io::ErrorKind::StorageFull.into())
    });
    assert_eq!((result.unwrap_err().kind(), taken), (io::ErrorKind::StorageFull, 1));
}

#[test]
fn a_line_of_maps_is_understood_or_refused() {
    let line = b"7f25dffff000-7f25e3fff000 rw-p 00001000 fe:01 10043631      /tmp/a b";
    let expected = Mapping {
        start: 0x7f25_dfff_f000,
        end: 0x7f25_e3ff_f000,
        rights: "rw-p".to_owned(),
        offset: 0x1000,
        dev: rustix::fs::makedev(0xfe, 1),
        ino: 10_043_631,
    };
    assert_eq!(Mapping::parse(line), Some(expected));
    for line in ["", "7f25dffff000 rw-p 0 0:0 0", "x-y rw-p 0 0:0 0", "0-1 rw-p 0 00 0"] {
        assert_eq!(Mapping::parse(line.as_bytes()), None, "{line}");
    }
}
