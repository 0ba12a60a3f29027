//! What a process wrote, the newest [`KEPT`] bytes of it.
//!
//! Offsets count from the first byte the process ever wrote, so readers are plain numbers: a reader
//! behind `start` has missed something, a reader at `end` has everything.

use std::collections::VecDeque;

/// Output kept per process: what fits a screen many times over, and not a machine's memory.
pub(crate) const KEPT: usize = 1024 * 1024;
/// What a change between stdout and stderr costs; counted, or single bytes in turn would cost more
/// than they say.
const MARK: usize = size_of::<Mark>();

#[derive(Default)]
pub(crate) struct Output {
    bytes: VecDeque<u8>,
    /// Where stdout and stderr take over from each other; the first is at or before `start`.
    marks: VecDeque<Mark>,
    start: u64,
}

#[derive(Debug, Clone, Copy)]
struct Mark {
    at: u64,
    stderr: bool,
}

impl Output {
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Memory that is held.
    pub(crate) fn size(&self) -> usize {
        self.bytes.len() + self.marks.len() * MARK
    }

    /// Memory that a reader at `offset` makes us hold.
    pub(crate) fn size_after(&self, offset: u64) -> usize {
        let marks = self.marks.len() - self.marks.partition_point(|mark| mark.at <= offset);
        usize::try_from(self.end().saturating_sub(offset)).unwrap_or(usize::MAX) + marks * MARK
    }

    /// Appends, and forgets the oldest as need be.
    pub(crate) fn push(&mut self, stderr: bool, mut written: &[u8]) {
        if written.is_empty() {
            return;
        }
        if written.len() > KEPT / 2 {
            let (older, newer) = written.split_at(written.len() - KEPT / 2);
            self.push(stderr, older);
            written = newer;
        }
        if self.marks.back().is_none_or(|mark| mark.stderr != stderr) {
            self.marks.push_back(Mark { at: self.end(), stderr });
        }
        // First room, then bytes: so the buffer never grows beyond what is kept.
        self.forget((self.size() + written.len()).saturating_sub(KEPT));
        self.bytes.extend(written);
    }

    fn forget(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes.len());
        self.bytes.drain(..bytes);
        self.start += bytes as u64;
        while self.marks.get(1).is_some_and(|next| next.at <= self.start) {
            self.marks.pop_front();
        }
    }

    /// Forgets everything but the count.
    pub(crate) fn clear(&mut self) {
        let all = self.bytes.len();
        self.forget(all);
        self.bytes = VecDeque::new();
        self.marks = VecDeque::new();
    }

    /// Gives back memory that a process which has ended will not need.
    pub(crate) fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.marks.shrink_to_fit();
    }

    /// Copies what is at `offset`, of one kind only: whether it is stderr, and how many bytes.
    /// Nothing if that is gone or not there yet.
    pub(crate) fn copy(&self, offset: u64, room: &mut [u8]) -> Option<(bool, usize)> {
        if offset < self.start || offset >= self.end() {
            return None;
        }
        let next = self.marks.partition_point(|mark| mark.at <= offset);
        let stderr = self.marks.get(next.checked_sub(1)?)?.stderr;
        let until = self.marks.get(next).map_or(self.end(), |mark| mark.at);
        let length = usize::try_from(until - offset).unwrap_or(usize::MAX).min(room.len());
        let from = usize::try_from(offset - self.start).ok()?;
        let (first, second) = self.bytes.as_slices();
        let first = first.get(from..).unwrap_or_default();
        let second = &second[from.saturating_sub(self.bytes.as_slices().0.len())..];
        let head = length.min(first.len());
        room[..head].copy_from_slice(&first[..head]);
        room[head..length].copy_from_slice(&second[..length - head]);
        Some((stderr, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &Output, mut offset: u64) -> Vec<(bool, Vec<u8>)> {
        let mut all = Vec::new();
        let mut room = vec![0; 7];
        while let Some((stderr, length)) = output.copy(offset, &mut room) {
            all.push((stderr, room[..length].to_vec()));
            offset += length as u64;
        }
        all
    }

    #[test]
    fn stdout_and_stderr_come_back_in_the_order_they_were_written() {
        let mut output = Output::default();
        output.push(false, b"one");
        output.push(true, b"two");
        output.push(false, b"three");
        let expected =
            [(false, b"one".to_vec()), (true, b"two".to_vec()), (false, b"three".to_vec())];
        assert_eq!(read(&output, 0), expected);
        assert_eq!(read(&output, 4), [(true, b"wo".to_vec()), (false, b"three".to_vec())]);
    }

    #[test]
    fn the_oldest_bytes_go_first_and_offsets_stay() {
        let mut output = Output::default();
        for round in 0..40_u8 {
            output.push(false, &vec![round; 64 * 1024]);
        }
        assert_eq!(output.end(), 40 * 64 * 1024);
        assert!(output.size() <= KEPT && output.size() > KEPT / 2);
        let mut room = [0; 1];
        assert_eq!(output.copy(0, &mut room), None);
        output.copy(output.start(), &mut room);
        assert_eq!(u64::from(room[0]), output.start() / (64 * 1024));
    }

    #[test]
    fn single_bytes_in_turn_cost_no_more_than_the_bound() {
        let mut output = Output::default();
        for round in 0..KEPT {
            output.push(round % 2 == 0, b"x");
        }
        assert!(output.size() <= KEPT + MARK);
        assert!(output.bytes.capacity() + output.marks.capacity() * MARK <= 4 * KEPT);
        assert_eq!(output.end(), KEPT as u64);
    }

    #[test]
    fn a_reader_that_has_everything_holds_nothing_back() {
        let mut output = Output::default();
        output.push(false, b"one");
        output.push(true, b"two");
        assert_eq!(output.size_after(6), 0);
        assert_eq!(output.size_after(1), 5 + MARK);
    }
}
