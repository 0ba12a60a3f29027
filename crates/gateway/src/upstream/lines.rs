//! Lines out of bytes, bounded: one that is too long is skipped to its end.

use bytes::BytesMut;

#[derive(Debug)]
pub(super) struct Lines {
    rest: BytesMut,
    skipping: bool,
    limit: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Whole(Vec<u8>),
    /// There was one, and it is gone.
    TooLong,
}

impl Lines {
    pub(super) fn new(limit: usize) -> Self {
        Self { rest: BytesMut::new(), skipping: false, limit }
    }

    /// What comes next is not the end of a line that was begun.
    pub(super) fn gap(&mut self) {
        self.rest.clear();
        self.skipping = true;
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Vec<Line> {
        let mut lines = Vec::new();
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = bytes.split_at(end + 1);
            bytes = rest;
            if std::mem::take(&mut self.skipping) {
                continue;
            }
            self.rest.extend_from_slice(line);
            let line = self.rest.split();
            match line.len() > self.limit {
                true => lines.push(Line::TooLong),
                false => lines.push(Line::Whole(line.trim_ascii().to_vec())),
            }
        }
        if !self.skipping {
            self.rest.extend_from_slice(bytes);
            if self.rest.len() > self.limit {
                lines.push(Line::TooLong);
                self.gap();
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_an_end_takes_no_more_memory_than_it_may() {
        let mut lines = Lines::new(1000);
        let mut told = 0;
        for _ in 0..10_000 {
            told += lines.push(&[b'x'; 1000]).len();
            assert!(lines.rest.len() <= 2000);
        }
        assert_eq!(told, 1);
        assert_eq!(lines.push(b"end\n{}\n"), [Line::Whole(b"{}".to_vec())]);
    }

    #[test]
    fn lines_are_whole_however_they_arrive() {
        let mut lines = Lines::new(100);
        assert_eq!(lines.push(b"{\"a\""), []);
        let both = [Line::Whole(b"{\"a\":1}".to_vec()), Line::Whole(b"{}".to_vec())];
        assert_eq!(lines.push(b":1}\r\n{}\n"), both);
    }
}
