//! The last line that a command printed, whatever else it printed. The guest is hostile: one line of any length is kept
//! up to a bound.

use torpor_protocol::JsonText;
use torpor_protocol::job::OUTPUT_MAX;

/// What the last line of a command is to its task.
#[derive(Debug, PartialEq)]
pub(super) enum LastLine {
    /// There is none, or it is no JSON.
    Nothing,
    Json(JsonText),
    /// It is longer than is kept.
    TooLong,
}

/// Reads output as it comes.
#[derive(Default)]
pub(super) struct Lines {
    line: Line,
    last: Option<Line>,
}

#[derive(Default)]
struct Line {
    bytes: Vec<u8>,
    long: bool,
}

impl Line {
    fn push(&mut self, part: &[u8]) {
        let room = OUTPUT_MAX - self.bytes.len();
        self.long |= part.len() > room;
        self.bytes.extend_from_slice(&part[..part.len().min(room)]);
    }

    fn is_blank(&self) -> bool {
        self.bytes.trim_ascii().is_empty()
    }
}

impl Lines {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ended) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            self.line.push(text);
            if ended {
                self.end_line();
            }
        }
    }

    /// Some output is missing here: what was begun is no line.
    pub(super) fn tear(&mut self) {
        self.line = Line::default();
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if !line.is_blank() {
            self.last = Some(line);
        }
    }

    pub(super) fn last(mut self) -> LastLine {
        self.end_line();
        match self.last {
            None => LastLine::Nothing,
            Some(Line { long: true, .. }) => LastLine::TooLong,
            Some(Line { bytes, long: false }) => {
                let text = std::str::from_utf8(&bytes).ok();
                text.and_then(|text| text.parse().ok()).map_or(LastLine::Nothing, LastLine::Json)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> LastLine {
        LastLine::Json(text.parse().unwrap())
    }

    fn last(pieces: &[&[u8]]) -> LastLine {
        let mut lines = Lines::default();
        pieces.iter().for_each(|piece| lines.push(piece));
        lines.last()
    }

    #[test]
    fn the_last_line_counts_with_or_without_its_end_and_however_it_comes() {
        let pieces: [&[u8]; 4] = [b"working\n{\"a\"", b": 1", b"}\n", b"\n  \n"];
        assert_eq!(last(&pieces), json("{\"a\": 1}"));
        assert_eq!(last(&[b"{}\n", b"[1, 2]"]), json("[1, 2]"));
        assert_eq!(last(&[b"{}\nno json"]), LastLine::Nothing);
        assert_eq!(last(&[]), LastLine::Nothing);
    }

    #[test]
    fn what_is_huge_or_no_text_is_no_output() {
        let huge = vec![b'1'; OUTPUT_MAX + 1];
        assert_eq!(last(&[&huge]), LastLine::TooLong);
        assert_eq!(last(&[&huge, b"\n7\n"]), json("7"));
        assert_eq!(last(&[b"\"\xff\xfe\"\n"]), LastLine::Nothing);
        let deep = vec![b'['; 10_000];
        assert_eq!(last(&[&deep]), LastLine::Nothing);
        let mut lines = Lines::default();
        lines.push(&huge);
        assert!(lines.line.bytes.len() <= OUTPUT_MAX);
    }

    #[test]
    fn a_line_that_is_torn_is_no_line() {
        let mut lines = Lines::default();
        lines.push(b"{\"whole\": 1}\n{\"torn\":");
        lines.tear();
        lines.push(b"\n");
        assert_eq!(lines.last(), json("{\"whole\": 1}"));
    }
}
