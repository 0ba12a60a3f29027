//! What a process wrote and when, the newest [`KEPT`] bytes of it.
//!
//! Offsets count from the first byte the process ever wrote, so readers are plain numbers: a reader
//! behind `start` has missed something, a reader at `end` has everything.

use std::collections::VecDeque;

/// Output kept per process: what fits a screen many times over, and not a machine's memory.
pub(crate) const KEPT: usize = 1024 * 1024;
/// What a change between stdout and stderr, or of the time, costs; counted, or single bytes in turn
/// would cost more than they say.
const MARK: usize = size_of::<Mark>();

#[derive(Default)]
pub(crate) struct Output {
    bytes: VecDeque<u8>,
    /// Where stdout and stderr take over from each other, or another millisecond begins; the first is
    /// at or before `start`.
    marks: VecDeque<Mark>,
    start: u64,
}

#[derive(Debug, Clone, Copy)]
struct Mark {
    at: u64,
    said: Said,
}

/// When, in Unix milliseconds, and in the lowest bit whether on stderr: one number, because a process
/// that writes little at a time has many of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Said(u64);

impl Said {
    fn new(stderr: bool, ms: u64) -> Self {
        Self(ms << 1 | u64::from(stderr))
    }

    fn stderr(self) -> bool {
        self.0 & 1 == 1
    }

    fn ms(self) -> u64 {
        self.0 >> 1
    }
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

    /// Appends what was written at `ms`, and forgets the oldest as need be.
    pub(crate) fn push(&mut self, stderr: bool, ms: u64, mut written: &[u8]) {
        if written.is_empty() {
            return;
        }
        if written.len() > KEPT / 2 {
            let (older, newer) = written.split_at(written.len() - KEPT / 2);
            self.push(stderr, ms, older);
            written = newer;
        }
        let said = Said::new(stderr, ms);
        if self.marks.back().is_none_or(|mark| mark.said != said) {
            self.marks.push_back(Mark { at: self.end(), said });
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

    /// When what is at `offset` was written, Unix milliseconds. Nothing if that is gone or not there yet.
    pub(crate) fn said_at(&self, offset: u64) -> Option<u64> {
        self.mark_of(offset).map(|mark| self.marks[mark].said.ms())
    }

    /// Which mark says what the byte at `offset` is.
    fn mark_of(&self, offset: u64) -> Option<usize> {
        if offset < self.start || offset >= self.end() {
            return None;
        }
        self.marks.partition_point(|mark| mark.at <= offset).checked_sub(1)
    }

    /// Copies what is at `offset`, of one kind only, and with `one_time` of one time only: whether it is
    /// stderr, and how many bytes. Nothing if that is gone or not there yet.
    pub(crate) fn copy(
        &self,
        offset: u64,
        one_time: bool,
        room: &mut [u8],
    ) -> Option<(bool, usize)> {
        let mark = self.mark_of(offset)?;
        let said = self.marks[mark].said;
        let other = |next: &Mark| one_time || next.said.stderr() != said.stderr();
        let far = |next: &Mark| next.at - offset >= room.len() as u64;
        let next = self.marks.range(mark + 1..).find(|next| other(next) || far(next));
        let until = next.map_or(self.end(), |next| next.at);
        let length = usize::try_from(until - offset).unwrap_or(usize::MAX).min(room.len());
        let from = usize::try_from(offset - self.start).ok()?;
        let (first, second) = self.bytes.as_slices();
        let first = first.get(from..).unwrap_or_default();
        let second = &second[from.saturating_sub(self.bytes.as_slices().0.len())..];
        let head = length.min(first.len());
        room[..head].copy_from_slice(&first[..head]);
        room[head..length].copy_from_slice(&second[..length - head]);
        Some((said.stderr(), length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &Output, mut offset: u64) -> Vec<(bool, Vec<u8>)> {
        let mut all = Vec::new();
        let mut room = vec![0; 7];
        while let Some((stderr, length)) = output.copy(offset, false, &mut room) {
            all.push((stderr, room[..length].to_vec()));
            offset += length as u64;
        }
        all
    }

    #[test]
    fn stdout_and_stderr_come_back_in_the_order_they_were_written() {
        let mut output = Output::default();
        output.push(false, 1, b"one");
        output.push(true, 1, b"two");
        output.push(false, 1, b"three");
        let expected =
            [(false, b"one".to_vec()), (true, b"two".to_vec()), (false, b"three".to_vec())];
        assert_eq!(read(&output, 0), expected);
        assert_eq!(read(&output, 4), [(true, b"wo".to_vec()), (false, b"three".to_vec())]);
    }

    #[test]
    fn the_oldest_bytes_go_first_and_offsets_stay() {
        let mut output = Output::default();
        for round in 0..40_u8 {
            output.push(false, 1, &vec![round; 64 * 1024]);
        }
        assert_eq!(output.end(), 40 * 64 * 1024);
        assert!(output.size() <= KEPT && output.size() > KEPT / 2);
        let mut room = [0; 1];
        assert_eq!(output.copy(0, false, &mut room), None);
        output.copy(output.start(), false, &mut room);
        assert_eq!(u64::from(room[0]), output.start() / (64 * 1024));
    }

    #[test]
    fn single_bytes_in_turn_cost_no_more_than_the_bound() {
        let mut output = Output::default();
        for round in 0..KEPT {
            output.push(round % 2 == 0, 1, b"x");
        }
        assert!(output.size() <= KEPT + MARK);
        assert!(output.bytes.capacity() + output.marks.capacity() * MARK <= 4 * KEPT);
        assert_eq!(output.end(), KEPT as u64);
    }

    #[test]
    fn a_reader_that_has_everything_holds_nothing_back() {
        let mut output = Output::default();
        output.push(false, 1, b"one");
        output.push(true, 1, b"two");
        assert_eq!(output.size_after(6), 0);
        assert_eq!(output.size_after(1), 5 + MARK);
    }

    #[test]
    fn every_byte_remembers_when_it_was_written() {
        let mut output = Output::default();
        for (ms, stderr, bytes) in
            [(5, false, "a"), (5, false, "b"), (6, false, "c"), (6, true, "d"), (4, true, "e")]
        {
            output.push(stderr, ms, bytes.as_bytes());
        }
        let times: Vec<_> = (0..6).map(|offset| output.said_at(offset)).collect();
        assert_eq!(times, [Some(5), Some(5), Some(6), Some(6), Some(4), None]);
        // Who asks for the time gets no more than was written then; all others get what fits.
        let mut room = [0; 8];
        assert_eq!(output.copy(0, true, &mut room), Some((false, 2)));
        assert_eq!(output.copy(0, false, &mut room), Some((false, 3)));
        assert_eq!(output.copy(3, true, &mut room), Some((true, 1)));
        assert_eq!(output.copy(3, false, &mut room), Some((true, 2)));
        assert_eq!(output.copy(0, false, &mut room[..1]), Some((false, 1)));
    }

    #[test]
    fn a_byte_a_millisecond_costs_no_more_than_the_bound() {
        let mut output = Output::default();
        for ms in 0..KEPT as u64 {
            output.push(false, ms, b"x");
        }
        assert!(output.size() <= KEPT + MARK);
        assert_eq!(output.said_at(output.start()), Some(output.start()));
    }
}
