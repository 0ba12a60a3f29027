//! Output of any length in bounded memory: its beginning and its end, and how much is missing between.

use std::collections::VecDeque;

/// The beginning and the end of what was fed.
pub(crate) struct Capture {
    half: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    fed: u64,
    skipped: u64,
}

impl Capture {
    /// Keeps at most `most` bytes.
    pub(crate) fn new(most: usize) -> Self {
        let half = most / 2;
        Self { half, head: Vec::new(), tail: VecDeque::new(), fed: 0, skipped: 0 }
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.fed += bytes.len() as u64;
        // What follows a gap is no beginning.
        let room = if self.skipped == 0 { self.half - self.head.len() } else { 0 };
        let (head, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(head);
        let kept = &rest[rest.len() - rest.len().min(self.half)..];
        let over = (self.tail.len() + kept.len()).saturating_sub(self.half);
        self.tail.drain(..over);
        self.tail.extend(kept);
    }

    /// So many bytes were lost before what is fed next.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.skipped += bytes;
        self.head.extend(self.tail.drain(..).take(self.half - self.head.len()));
    }

    /// All bytes there were.
    pub(crate) fn bytes(&self) -> u64 {
        self.fed + self.skipped
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.bytes() > (self.head.len() + self.tail.len()) as u64
    }

    /// As text. What is missing says so in a line of its own; bytes that are no UTF-8 show as U+FFFD.
    pub(crate) fn text(&self) -> String {
        let tail: Vec<u8> = self.tail.iter().copied().collect();
        if !self.is_cut() {
            let whole = [self.head.as_slice(), &tail].concat();
            return String::from_utf8_lossy(&whole).into_owned();
        }
        let (head, tail) = (until_character(&self.head), from_character(&tail));
        let left_out = self.bytes() - (head.len() + tail.len()) as u64;
        format!(
            "{}\n[… {left_out} of {} bytes left out …]\n{}",
            String::from_utf8_lossy(head),
            self.bytes(),
            String::from_utf8_lossy(tail)
        )
    }

    /// The last line that is not empty, for people: short and without control characters.
    pub(crate) fn last_line(&self) -> Option<String> {
        const SHOWN: usize = 200;
        let tail =
            if self.tail.is_empty() { self.head.clone() } else { Vec::from(self.tail.clone()) };
        let text = String::from_utf8_lossy(&tail[tail.len() - tail.len().min(4 * SHOWN)..]);
        let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
        Some(line.chars().filter(|c| !c.is_control()).take(SHOWN).collect())
    }
}

/// Without a last character that is cut in two.
fn until_character(bytes: &[u8]) -> &[u8] {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => &bytes[..error.valid_up_to()],
        Ok(_) | Err(_) => bytes,
    }
}

/// Without a first character whose beginning is missing.
fn from_character(bytes: &[u8]) -> &[u8] {
    let rest = bytes.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
    &bytes[rest..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_kept_as_it_is() {
        let mut capture = Capture::new(10);
        capture.feed(b"hello");
        capture.feed(b"world");
        assert_eq!((capture.text().as_str(), capture.is_cut()), ("helloworld", false));
    }

    #[test]
    fn of_more_the_beginning_and_the_end_stay_however_it_comes_in_pieces() {
        for piece in [1, 3, 7, 1000] {
            let all: Vec<u8> = (0..1000u32).map(|n| b'a' + (n % 26) as u8).collect();
            let mut capture = Capture::new(20);
            all.chunks(piece).for_each(|piece| capture.feed(piece));
            let text = capture.text();
            assert!(text.starts_with("abcdefghij\n[… 980 of 1000 bytes"), "{piece}: {text}");
            assert!(text.as_bytes().ends_with(&all[990..]), "{piece}: {text}");
            assert!(capture.is_cut() && capture.bytes() == 1000);
        }
    }

    #[test]
    fn a_character_is_never_cut_in_two() {
        let mut capture = Capture::new(9);
        capture.feed("€€€€€€".as_bytes());
        let text = capture.text();
        assert!(
            !text.contains('\u{fffd}') && text.starts_with('€') && text.ends_with('€'),
            "{text}"
        );
        assert!(text.contains("[… 12 of 18 bytes"), "{text}");
    }

    #[test]
    fn what_nobody_could_read_in_time_is_counted() {
        let mut capture = Capture::new(20);
        capture.feed(b"begin");
        capture.skip(1_000_000);
        capture.feed(b"end");
        assert_eq!(capture.text(), "begin\n[… 1000000 of 1000008 bytes left out …]\nend");
    }

    #[test]
    fn the_last_line_is_short_and_plain() {
        let mut capture = Capture::new(4000);
        capture.feed(b"one\n\x1b[31mtwo\x07\n\n");
        assert_eq!(capture.last_line().as_deref(), Some("[31mtwo"));
        capture.feed(&[b'x'; 3000]);
        assert_eq!(capture.last_line().unwrap().len(), 200);
    }
}
