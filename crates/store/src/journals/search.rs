//! Finding lines in the two files of a journal, whose stamps grow.
//!
//! No more than one line and what was found is in memory at a time. What is not a whole line of ours
//! is skipped.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use torpor_lifecycle::store::Search;
use torpor_protocol::guest::LogLine;

/// From here on reading is quicker than jumping about.
const STRIDE: u64 = 64 * 1024;

/// The lines that are searched for, oldest first.
pub(super) fn lines(
    before: Option<File>,
    newest: Option<File>,
    search: &Search,
) -> io::Result<Vec<LogLine>> {
    let wanted = Wanted { search, processes: search.processes.iter().copied().collect() };
    let mut found = VecDeque::new();
    if search.newest {
        for file in [newest, before].into_iter().flatten() {
            for line in wanted.newest_of(file, search.limit - found.len())?.into_iter().rev() {
                found.push_front(line);
            }
        }
    } else {
        for file in [before, newest].into_iter().flatten() {
            wanted.oldest_of(file, &mut found)?;
        }
    }
    Ok(found.into())
}

/// The stamp of the last line of a file.
pub(super) fn last_stamp(file: &File) -> io::Result<Option<u64>> {
    let len = file.metadata()?.len();
    let mut window = STRIDE;
    loop {
        let from = len.saturating_sub(window);
        let mut bytes = vec![0; usize::try_from(len - from).unwrap_or(0)];
        file.read_exact_at(&mut bytes, from)?;
        // What follows the last line end is torn, or nothing.
        let mut pieces: Vec<_> = bytes.split(|byte| *byte == b'\n').rev().skip(1).collect();
        if from > 0 {
            // Perhaps the end of a line that begins further up.
            pieces.pop();
        }
        let stamp = pieces.into_iter().find_map(parse).map(|line| line.stamp_us);
        if stamp.is_some() || from == 0 {
            return Ok(stamp);
        }
        window *= 4;
    }
}

struct Wanted<'a> {
    search: &'a Search,
    processes: HashSet<(u32, u64)>,
}

impl Wanted<'_> {
    fn matches(&self, line: &LogLine) -> bool {
        let search = self.search;
        line.stamp_us > search.after_us
            && search.stderr.is_none_or(|stderr| line.stderr == stderr)
            && (self.processes.is_empty()
                || self.processes.contains(&(line.pid, line.started_at_ms)))
            && search.text.as_ref().is_none_or(|text| line.text.contains(text))
    }

    /// Adds what is found until there is enough.
    fn oldest_of(&self, file: File, found: &mut VecDeque<LogLine>) -> io::Result<()> {
        let mut scroll = Scroll::open(file, self.search.after_us)?;
        while found.len() < self.search.limit
            && let Some(line) = scroll.next_line(u64::MAX)?
        {
            if self.matches(&line) {
                found.push_back(line);
            }
        }
        Ok(())
    }

    fn newest_of(&self, file: File, limit: usize) -> io::Result<VecDeque<LogLine>> {
        let mut found = VecDeque::new();
        if limit == 0 {
            return Ok(found);
        }
        let mut scroll = Scroll::open(file, self.search.after_us)?;
        while let Some(line) = scroll.next_line(u64::MAX)? {
            if self.matches(&line) {
                if found.len() == limit {
                    found.pop_front();
                }
                found.push_back(line);
            }
        }
        Ok(found)
    }
}

/// A file that is read line by line, and where its next line begins.
struct Scroll {
    file: BufReader<File>,
    at: u64,
    line: Vec<u8>,
}

impl Scroll {
    /// Begins somewhere before the first stamp above `after_us`, by halving.
    fn open(file: File, after_us: u64) -> io::Result<Self> {
        // Every line before `low` is too old; none between `high` and the end is.
        let (mut low, mut high) = (0, file.metadata()?.len());
        let mut scroll = Self { file: BufReader::new(file), at: 0, line: Vec::new() };
        while after_us > 0 && high.saturating_sub(low) > STRIDE {
            let middle = low + (high - low) / 2;
            scroll.go(middle)?;
            // To the beginning of a line.
            scroll.next_piece()?;
            match scroll.next_line(high)? {
                Some(line) if line.stamp_us <= after_us => low = scroll.at,
                Some(_) | None => high = middle,
            }
        }
        scroll.go(low)?;
        Ok(scroll)
    }

    fn go(&mut self, to: u64) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(to))?;
        self.at = to;
        Ok(())
    }

    /// The next line that is one and begins before `end`.
    fn next_line(&mut self, end: u64) -> io::Result<Option<LogLine>> {
        while self.at < end && self.next_piece()? {
            if let Some(line) = parse(&self.line) {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }

    /// Reads up to a line end; `false` if there is none any more.
    fn next_piece(&mut self) -> io::Result<bool> {
        self.line.clear();
        let read = self.file.read_until(b'\n', &mut self.line)?;
        self.at += read as u64;
        Ok(self.line.pop() == Some(b'\n'))
    }
}

fn parse(line: &[u8]) -> Option<LogLine> {
    serde_json::from_slice(line).ok()
}
