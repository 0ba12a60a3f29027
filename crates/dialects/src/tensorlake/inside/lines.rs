//! Bytes to lines: cut at every line feed, whatever else is in them.

/// A longer line is told in pieces: somebody may write for ever without an end of line.
pub(super) const LINE_MAX: usize = 1024 * 1024;

/// Keeps the beginning of a line until its end is there.
#[derive(Default)]
pub(super) struct Cutter {
    /// At most [`LINE_MAX`] bytes between calls.
    begun: Vec<u8>,
}

/// A line without its line feed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// Bytes that are not UTF-8 show as U+FFFD.
    pub(super) text: String,
    /// Whether there was a line feed, or only a piece of a line.
    pub(super) ended: bool,
}

impl Line {
    fn new(bytes: &[u8], ended: bool) -> Self {
        Self { text: String::from_utf8_lossy(bytes).into_owned(), ended }
    }
}

impl Cutter {
    pub(super) fn push(&mut self, mut bytes: &[u8], mut tell: impl FnMut(Line)) {
        while let Some(at) = bytes.iter().position(|byte| *byte == b'\n') {
            self.extend(&bytes[..at], &mut tell);
            tell(Line::new(&std::mem::take(&mut self.begun), true));
            bytes = &bytes[at + 1..];
        }
        self.extend(bytes, &mut tell);
    }

    /// What was not ended by a line feed, if there is anything.
    pub(super) fn flush(&mut self) -> Option<Line> {
        let rest = std::mem::take(&mut self.begun);
        (!rest.is_empty()).then(|| Line::new(&rest, false))
    }

    fn extend(&mut self, bytes: &[u8], tell: &mut impl FnMut(Line)) {
        self.begun.extend_from_slice(bytes);
        while self.begun.len() > LINE_MAX {
            let rest = self.begun.split_off(boundary(&self.begun));
            tell(Line::new(&self.begun, false));
            self.begun = rest;
        }
    }
}

/// Where a piece ends: before a character that would be cut in two.
fn boundary(bytes: &[u8]) -> usize {
    let begins = |at: &usize| bytes[*at] & 0b1100_0000 != 0b1000_0000;
    // A character has at most four bytes.
    (LINE_MAX - 3..=LINE_MAX).rev().find(begins).unwrap_or(LINE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pushed: &[&[u8]]) -> (Vec<String>, Option<Line>) {
        let mut cutter = Cutter::default();
        let mut lines = Vec::new();
        for bytes in pushed {
            cutter.push(bytes, |line| {
                assert!(line.ended);
                lines.push(line.text);
            });
        }
        (lines, cutter.flush())
    }

    #[test]
    fn a_line_ends_at_its_line_feed_and_nowhere_else() {
        let (cut, rest) = lines(&[b"a\nb\r\n\nc", b"d\n"]);
        assert_eq!(cut, ["a", "b\r", "", "cd"]);
        assert_eq!(rest, None);
    }

    #[test]
    fn the_last_line_needs_no_line_feed() {
        let (cut, rest) = lines(&[b"a\nb"]);
        assert_eq!(cut, ["a"]);
        assert_eq!(rest, Some(Line { text: "b".into(), ended: false }));
    }

    #[test]
    fn a_character_that_is_cut_by_a_packet_stays_whole_and_bytes_that_are_none_are_shown() {
        let (cut, _) = lines(&[b"\xe2\x82", b"\xac\n", b"\xff\n"]);
        assert_eq!(cut, ["€", "\u{fffd}"]);
    }

    #[test]
    fn a_line_that_does_not_end_is_told_in_pieces_of_whole_characters() {
        let long = "€".repeat(LINE_MAX);
        let mut cutter = Cutter::default();
        let mut pieces = Vec::new();
        for bytes in long.as_bytes().chunks(1000) {
            cutter.push(bytes, |line| pieces.push(line));
        }
        pieces.extend(cutter.flush());
        assert_eq!(pieces.len(), 4);
        assert!(pieces.iter().all(|line| !line.ended && line.text.len() <= LINE_MAX));
        assert_eq!(pieces.iter().map(|line| &*line.text).collect::<String>(), long);
    }
}
