//! What processes without a terminal said lately, line by line: one ring for the whole agent.
//!
//! ```text
//!            when asked             when there is no room
//!   pieces, as they came ──▶ lines with stamps ──▶ gone
//! ```
//!
//! Taking output apart costs more than reading it, and mostly nobody asks. So it is kept as it came
//! until somebody does. The oldest goes first; a line whose beginning is gone goes with it.
//!
//! Invariants:
//! - Stamps only grow, and a line that has one keeps it.
//! - All that is kept takes at most [`KEPT`] bytes, and a line that was begun for each stdout and stderr.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::Read;
use std::rc::Rc;

use torpor_protocol::guest::{LogLine, Reply};

use crate::agent::Agent;
use crate::stream::Stream;

/// Kept of all processes together: enough for whoever asks now and then, and little to save with a
/// machine.
const KEPT: usize = 1024 * 1024;
/// A line is cut at so many bytes: one line is not the whole ring.
const LINE_MAX: usize = 4096;
/// Longest piece, so that the oldest goes in small steps.
const PIECE_MAX: usize = 64 * 1024;
/// Bytes of a program's name that a line shows; many lines fit into a packet.
const PROGRAM_SHOWN: usize = 256;
/// Bytes of one batch of lines; a line is never larger than the rest of a packet, even if every byte
/// of it has to be escaped.
const BATCH: usize = 64 * 1024;

#[derive(Default)]
pub(crate) struct Lines {
    ring: RefCell<Ring>,
}

#[derive(Default)]
struct Ring {
    /// What was not taken apart yet; its bytes in turn are in `raw`.
    pieces: VecDeque<Piece>,
    raw: VecDeque<u8>,
    /// What was; older than all pieces. Their bytes in turn are in `text`.
    lines: VecDeque<Line>,
    text: VecDeque<u8>,
    /// The newest stamp.
    last_us: u64,
    /// What those who said all this take.
    speakers: usize,
}

struct Piece {
    speaker: Rc<Speaker>,
    stderr: bool,
    at_us: u64,
    /// None: nothing more is said, and the line that was begun is the last one.
    length: usize,
}

struct Line {
    speaker: Rc<Speaker>,
    stamp_us: u64,
    length: u32,
    stderr: bool,
}

/// One life of a process, as its lines tell of it.
#[derive(Default)]
pub(super) struct Speaker {
    pid: u32,
    started_at_ms: u64,
    program: String,
    name: Option<String>,
    stdout: RefCell<Voice>,
    stderr: RefCell<Voice>,
    /// Its pieces and lines in the ring.
    held: Cell<usize>,
}

#[derive(Default)]
struct Voice {
    /// Whether the last that was said ended no line.
    open: bool,
    /// Of a line whose end was not taken apart yet: as much as it takes to cut it.
    begun: Vec<u8>,
    /// The beginning of the next line is gone.
    headless: bool,
}

impl Speaker {
    pub(super) fn new(pid: u32, started_at_ms: u64, program: &str, name: Option<&str>) -> Self {
        let program = &program[..program.floor_char_boundary(PROGRAM_SHOWN)];
        let (program, name) = (program.to_owned(), name.map(str::to_owned));
        Self { pid, started_at_ms, program, name, ..Self::default() }
    }

    fn voice(&self, stderr: bool) -> &RefCell<Voice> {
        if stderr { &self.stderr } else { &self.stdout }
    }

    fn size(&self) -> usize {
        size_of::<Self>() + self.program.len() + self.name.as_ref().map_or(0, String::len)
    }
}

impl Lines {
    /// Something was said.
    pub(super) fn push(&self, speaker: &Rc<Speaker>, stderr: bool, at_us: u64, said: &[u8]) {
        let Some(last) = said.last() else { return };
        speaker.voice(stderr).borrow_mut().open = *last != b'\n';
        for piece in said.chunks(PIECE_MAX) {
            self.ring.borrow_mut().push(speaker, stderr, at_us, piece);
        }
    }

    /// The agent itself has something to say.
    pub(crate) fn note(&self, text: &str) {
        let speaker = Rc::new(Speaker::new(std::process::id(), 0, "torpor-agent", None));
        self.push(&speaker, true, super::now_us(), format!("{text}\n").as_bytes());
    }

    /// The process ended: what it said last is a line, terminated or not.
    pub(super) fn end(&self, speaker: &Rc<Speaker>, at_us: u64) {
        for stderr in [false, true] {
            if std::mem::take(&mut speaker.voice(stderr).borrow_mut().open) {
                self.ring.borrow_mut().push(speaker, stderr, at_us, &[]);
            }
        }
    }
}

impl Ring {
    fn size(&self) -> usize {
        let records = self.pieces.len() * size_of::<Piece>() + self.lines.len() * size_of::<Line>();
        self.raw.len() + self.text.len() + records + self.speakers
    }

    fn push(&mut self, speaker: &Rc<Speaker>, stderr: bool, at_us: u64, said: &[u8]) {
        self.hold(speaker);
        self.make_room(size_of::<Piece>() + said.len());
        self.raw.extend(said);
        let speaker = speaker.clone();
        self.pieces.push_back(Piece { speaker, stderr, at_us, length: said.len() });
    }

    fn hold(&mut self, speaker: &Speaker) {
        if speaker.held.get() == 0 {
            self.speakers += speaker.size();
        }
        speaker.held.set(speaker.held.get() + 1);
    }

    fn let_go(&mut self, speaker: &Speaker) {
        speaker.held.set(speaker.held.get() - 1);
        if speaker.held.get() == 0 {
            self.speakers -= speaker.size();
        }
    }

    /// Forgets the oldest until so many bytes fit.
    fn make_room(&mut self, bytes: usize) {
        while self.size() + bytes > KEPT && (self.forget_line() || self.forget_piece()) {}
    }

    fn forget_line(&mut self) -> bool {
        let Some(line) = self.lines.pop_front() else { return false };
        self.text.drain(..line.length as usize);
        self.let_go(&line.speaker);
        true
    }

    fn forget_piece(&mut self) -> bool {
        let Some(piece) = self.pieces.pop_front() else { return false };
        let last = piece.length.checked_sub(1).map(|last| self.raw[last]);
        self.raw.drain(..piece.length);
        {
            let mut voice = piece.speaker.voice(piece.stderr).borrow_mut();
            voice.begun = Vec::new();
            voice.headless = last.is_some_and(|last| last != b'\n');
        }
        self.let_go(&piece.speaker);
        true
    }

    // === When asked ===

    /// Makes lines of all pieces.
    fn settle(&mut self) {
        let mut raw = std::mem::take(&mut self.raw);
        for piece in std::mem::take(&mut self.pieces) {
            let mut said = vec![0; piece.length];
            raw.read_exact(&mut said).expect("the bytes of each piece are there");
            self.take_apart(&piece, &said);
            self.let_go(&piece.speaker);
        }
    }

    fn take_apart(&mut self, piece: &Piece, said: &[u8]) {
        let mut voice = piece.speaker.voice(piece.stderr).borrow_mut();
        let mut left = said;
        while let Some(end) = left.iter().position(|byte| *byte == b'\n') {
            voice.go_on(&left[..end]);
            left = &left[end + 1..];
            self.add(piece, &mut voice);
        }
        voice.go_on(left);
        if said.is_empty() {
            self.add(piece, &mut voice);
            voice.begun = Vec::new();
        }
    }

    /// A line is complete.
    fn add(&mut self, piece: &Piece, voice: &mut Voice) {
        if !std::mem::take(&mut voice.headless) {
            let line = trimmed(&voice.begun);
            self.hold(&piece.speaker);
            self.make_room(size_of::<Line>() + line.len());
            self.text.extend(line);
            self.last_us = piece.at_us.max(self.last_us + 1);
            self.lines.push_back(Line {
                speaker: piece.speaker.clone(),
                stamp_us: self.last_us,
                length: u32::try_from(line.len()).expect("lines are cut"),
                stderr: piece.stderr,
            });
        }
        voice.begun.clear();
    }

    /// Lines after one stamp and up to another, as many as a batch holds.
    fn batch(&self, after_us: u64, until_us: u64) -> Vec<LogLine> {
        let first = self.lines.partition_point(|line| line.stamp_us <= after_us);
        let mut from = self.lines.range(..first).map(|line| line.length as usize).sum::<usize>();
        let (mut batch, mut size) = (Vec::new(), 0);
        for line in self.lines.range(first..).take_while(|line| line.stamp_us <= until_us) {
            let to = from + line.length as usize;
            let text: Vec<u8> = self.text.range(from..to).copied().collect();
            from = to;
            let line = line.told(&text);
            size += serde_json::to_vec(&line).map_or(0, |json| json.len() + 1);
            batch.push(line);
            if size > BATCH {
                break;
            }
        }
        batch
    }
}

impl Voice {
    /// More of the same line; one byte too many shows where to cut it.
    fn go_on(&mut self, said: &[u8]) {
        let room = (LINE_MAX + 1).saturating_sub(self.begun.len());
        self.begun.extend_from_slice(&said[..said.len().min(room)]);
    }
}

impl Line {
    fn told(&self, text: &[u8]) -> LogLine {
        let speaker = &self.speaker;
        LogLine {
            stamp_us: self.stamp_us,
            pid: speaker.pid,
            started_at_ms: speaker.started_at_ms,
            command: speaker.program.clone(),
            name: speaker.name.clone(),
            stderr: self.stderr,
            text: String::from_utf8_lossy(text).into_owned(),
        }
    }
}

/// A line without its end; one that is too long is cut between characters.
fn trimmed(line: &[u8]) -> &[u8] {
    if line.len() <= LINE_MAX {
        return line.strip_suffix(b"\r").unwrap_or(line);
    }
    let inside = |byte: &u8| byte & 0b1100_0000 == 0b1000_0000;
    // A character has no more than three bytes after its first.
    let cut = (LINE_MAX - 3..=LINE_MAX).rev().find(|at| !inside(&line[*at]));
    &line[..cut.unwrap_or(LINE_MAX)]
}

/// Sends the lines that were said after `after_us` and until now, in as many replies as it takes.
pub(crate) async fn send_lines(agent: &Agent, stream: &Stream, after_us: u64) {
    let ring = &agent.lines.ring;
    ring.borrow_mut().settle();
    let until_us = ring.borrow().last_us;
    let mut after_us = after_us;
    loop {
        let lines = ring.borrow().batch(after_us, until_us);
        let Some(last) = lines.last() else { return };
        after_us = last.stamp_us;
        stream.reply(&Reply::Lines { lines }).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speaker(pid: u32) -> Rc<Speaker> {
        Rc::new(Speaker::new(pid, 7, "sh", None))
    }

    /// All lines after a stamp, as whoever asks gets them.
    fn told(lines: &Lines, after_us: u64) -> Vec<LogLine> {
        let mut ring = lines.ring.borrow_mut();
        ring.settle();
        assert!(ring.size() <= KEPT);
        let (mut all, mut after_us) = (Vec::new(), after_us);
        loop {
            let batch = ring.batch(after_us, u64::MAX);
            let Some(last) = batch.last() else { return all };
            after_us = last.stamp_us;
            all.extend(batch);
        }
    }

    fn texts(lines: &Lines) -> Vec<String> {
        told(lines, 0).into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn lines_of_several_voices_are_put_together_again() {
        let lines = Lines::default();
        let (one, two) = (speaker(1), speaker(2));
        lines.push(&one, false, 10, b"on");
        lines.push(&two, false, 11, b"two\r\nthr");
        lines.push(&one, true, 12, b"error\n\n");
        assert_eq!(texts(&lines), ["two", "error", ""]);
        lines.push(&one, false, 13, b"e\nlast");
        lines.push(&two, false, 14, b"ee\n");
        lines.end(&one, 15);
        lines.end(&two, 16);
        let all = told(&lines, 0);
        let shown: Vec<_> = all.iter().map(|line| (line.pid, line.stderr, &*line.text)).collect();
        let (first, second) = ((2, false, "two"), [(1, true, "error"), (1, true, "")]);
        let third = [(1, false, "one"), (2, false, "three"), (1, false, "last")];
        assert_eq!(shown, [&[first][..], &second, &third].concat());
    }

    #[test]
    fn stamps_only_grow_and_a_line_keeps_its_stamp() {
        let lines = Lines::default();
        let speaker = speaker(1);
        lines.push(&speaker, false, 100, b"a\nb\n");
        let before = told(&lines, 0);
        assert_eq!(before.iter().map(|line| line.stamp_us).collect::<Vec<_>>(), [100, 101]);
        // The clock was set back meanwhile.
        lines.push(&speaker, false, 5, b"c\n");
        lines.push(&speaker, false, 500, b"d\n");
        assert_eq!(told(&lines, 0)[..2], before);
        let after: Vec<_> = told(&lines, 101).iter().map(|line| line.stamp_us).collect();
        assert_eq!(after, [102, 500]);
        assert_eq!(told(&lines, 500), []);
    }

    #[test]
    fn a_long_line_is_cut_between_characters_and_stays_one_line() {
        let lines = Lines::default();
        let speaker = speaker(1);
        for _ in 0..100 {
            lines.push(&speaker, false, 1, "aéé".repeat(100).as_bytes());
        }
        lines.push(&speaker, false, 1, b"\nnext\n");
        let text = texts(&lines);
        assert_eq!(text.len(), 2);
        assert!(text[0].len() > LINE_MAX - 4 && text[0].len() <= LINE_MAX);
        assert!("aéé".repeat(2000).starts_with(&text[0]));
        assert_eq!(text[1], "next");
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced() {
        let lines = Lines::default();
        lines.push(&speaker(1), false, 1, b"a\xffb\0\n");
        assert_eq!(texts(&lines), ["a\u{fffd}b\0"]);
    }

    #[test]
    fn the_oldest_lines_go_first_and_broken_ones_with_them() {
        let lines = Lines::default();
        let (talker, quiet) = (speaker(1), speaker(2));
        lines.push(&quiet, false, 1, b"hello\nunfinished");
        assert_eq!(texts(&lines), ["hello"]);
        let said: String = (0..400_000).map(|number| format!("line {number}\n")).collect();
        for piece in said.as_bytes().chunks(10_000) {
            lines.push(&talker, false, 2, piece);
        }
        lines.push(&quiet, false, 3, b" line\n");
        let kept = texts(&lines);
        let whole = |line: &String| line.strip_prefix("line ").is_some_and(|it| it.len() == 6);
        assert!(kept.len() > 10_000 && kept[..kept.len() - 1].iter().all(whole));
        assert_eq!(kept[kept.len() - 2..], ["line 399999", "unfinished line"]);
    }

    #[test]
    fn a_line_whose_beginning_is_gone_is_not_shown() {
        let lines = Lines::default();
        let speaker = speaker(1);
        let flood = vec![b'x'; 2 * KEPT];
        lines.push(&speaker, false, 1, &flood);
        lines.push(&speaker, false, 2, b"end of it\nnext\n");
        assert_eq!(texts(&lines), ["next"]);
        lines.push(&speaker, false, 3, &flood);
        lines.end(&speaker, 4);
        assert_eq!(told(&lines, 3), []);
    }

    #[test]
    fn whatever_is_said_memory_is_bounded() {
        let lines = Lines::default();
        let name = "n".repeat(200);
        for pid in 0..20_000 {
            let speaker = Rc::new(Speaker::new(pid, 1, &"p".repeat(300), Some(&name)));
            lines.push(&speaker, pid % 2 == 0, 1, b"\n\nx");
            lines.end(&speaker, 1);
            assert!(lines.ring.borrow().size() <= KEPT);
        }
        let kept = told(&lines, 0);
        assert_eq!(kept.last().map(|line| line.pid), Some(19_999));
        let empty = speaker(1);
        for _ in 0..10 {
            lines.push(&empty, false, 1, &[b'\n'; 100_000]);
            assert!(told(&lines, 0).len() <= KEPT / size_of::<Line>());
        }
        assert_eq!(lines.ring.borrow().speakers, empty.size());
    }

    #[test]
    fn a_batch_of_the_worst_lines_fits_into_a_packet() {
        let lines = Lines::default();
        let worst = "\u{1}".repeat(10_000);
        let speaker = Rc::new(Speaker::new(u32::MAX, u64::MAX, &worst, Some(&worst[..256])));
        for _ in 0..20 {
            lines.push(&speaker, true, 1, format!("{worst}\n").as_bytes());
        }
        told(&lines, 0);
        let ring = lines.ring.borrow();
        let batch = ring.batch(0, u64::MAX);
        assert!(batch.len() > 1 && batch.len() < 20);
        let json = serde_json::to_vec(&Reply::Lines { lines: batch }).unwrap();
        assert!(json.len() < torpor_protocol::guest::MAX_PAYLOAD, "{}", json.len());
    }
}
