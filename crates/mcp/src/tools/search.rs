//! Looking for files by name, and in them for text.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{Command, OutputStream};
use torpor_service::processes::{self, Output, Said};
use torpor_service::{Error, Result, files};

use super::files::{Listing, checked, limited};
use crate::answer::Answer;
use crate::run::within;
use crate::tool::{Call, Effect, Tool};

/// Deeper trees are looked through from further below.
const DEPTH: u32 = 64;
const PATTERN_MAX: usize = 1024;
/// Matching lines in one answer.
const MATCHES: usize = 100;
const MATCHES_MAX: usize = 1000;
/// Characters of a matching line that are shown.
const LINE_SHOWN: usize = 500;
/// A longer line is cut while it is read.
const LINE_MAX: usize = 64 * 1024;
/// How long a search may take: less than clients wait.
const SEARCH_DEADLINE: Duration = Duration::from_secs(40);
/// Exit code of grep when something went wrong.
const GREP_FAILED: i32 = 2;
const COMPLAINT_MAX: usize = 1000;
/// Names that are compared before somebody looks whether that is still wanted: the worst take some milliseconds
/// each.
const LOOK_EACH: usize = 256;

fn root() -> String {
    "/".to_owned()
}

fn pattern_checked(pattern: &str) -> Result<()> {
    if pattern.is_empty() || pattern.len() > PATTERN_MAX || pattern.contains('\0') {
        let message = format!("pattern has 1 to {PATTERN_MAX} bytes, and no NUL");
        return Err(Error::invalid(message));
    }
    Ok(())
}

// === find_files ===

/// Arguments of `find_files`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct FindFiles {
    /// What names look like: `*` any text within a name, `?` one character, `**` any number of directories.
    /// Without a slash it is compared with the name (`*.rs`), else with the path below `path`
    /// (`src/**/*.rs`).
    pattern: String,
    /// Absolute path of the directory to look in. Default: /
    #[serde(default = "root")]
    path: String,
    /// Entries in the answer. Default 500, at most 5000.
    #[serde(default)]
    #[schemars(range(min = 1, max = 5000))]
    limit: Option<usize>,
}

impl Tool for FindFiles {
    const NAME: &'static str = "find_files";
    const TITLE: &'static str = "Find files by name";
    const ABOUT: &'static str = "Find files and directories by a pattern of their names, such as *.py or \
        src/**/test_*.rs, in a directory and all below it. Links are not followed.";
    const EFFECT: Effect = Effect::Reads;
    type Output = Listing;

    async fn call(self, call: &Call) -> Result<Answer> {
        pattern_checked(&self.pattern)?;
        let limit = limited(self.limit)?;
        let path = checked(self.path)?;
        let awake = call.awake().await?;
        let all = files::list(&awake, path.clone(), DEPTH).await?;
        let pattern = Pattern::new(&self.pattern);
        let (until, cancelled) = (Instant::now() + SEARCH_DEADLINE, call.cancelled.clone());
        // Many names take a while.
        let compared = tokio::task::spawn_blocking(move || -> Result<Listing> {
            let mut found = Vec::new();
            for (at, entry) in all.into_iter().enumerate() {
                if at % LOOK_EACH == 0 {
                    go_on(until, &cancelled)?;
                }
                if pattern.matches(&entry.path) {
                    found.push(entry);
                }
            }
            Ok(Listing::of(found, &path, limit))
        });
        let found = compared.await.map_err(|error| {
            Error::new(ErrorCode::Internal, format!("names could not be compared: {error}"))
        })?;
        Ok(found?.answer())
    }
}

fn go_on(until: Instant, cancelled: &CancellationToken) -> Result<()> {
    if cancelled.is_cancelled() {
        return Err(Error::invalid("the call was cancelled"));
    }
    if Instant::now() >= until {
        let message = format!("stopped after {} s", SEARCH_DEADLINE.as_secs());
        let hint = "look in a smaller part, or for a simpler pattern";
        return Err(Error::with_hint(ErrorCode::Timeout, message, hint));
    }
    Ok(())
}

/// What names look like.
enum Pattern {
    /// Compared with the name.
    Name(Vec<char>),
    /// Compared with the path below the directory that is looked through.
    Path(Vec<Part>),
}

enum Part {
    /// Any number of directories.
    Any,
    Name(Vec<char>),
}

impl Pattern {
    fn new(text: &str) -> Self {
        if !text.contains('/') {
            return Self::Name(text.chars().collect());
        }
        let parts = text.split('/').filter(|part| !part.is_empty()).map(|part| match part {
            "**" => Part::Any,
            name => Part::Name(name.chars().collect()),
        });
        Self::Path(parts.collect())
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            Self::Name(pattern) => {
                name_matches(pattern, path.rsplit('/').next().unwrap_or_default())
            }
            Self::Path(pattern) => path_matches(pattern, path),
        }
    }
}

/// Which beginnings of the pattern fit the path so far: never more work than pattern times path.
fn path_matches(pattern: &[Part], path: &str) -> bool {
    let mut fits = vec![false; pattern.len() + 1];
    fits[0] = true;
    for (at, part) in pattern.iter().enumerate() {
        fits[at + 1] = fits[at] && matches!(part, Part::Any);
    }
    for name in path.split('/').filter(|name| !name.is_empty()) {
        let before = std::mem::replace(&mut fits, vec![false; pattern.len() + 1]);
        for (at, part) in pattern.iter().enumerate() {
            fits[at + 1] = match part {
                Part::Any => before[at + 1] || fits[at] || before[at],
                Part::Name(part) => before[at] && name_matches(part, name),
            };
        }
    }
    fits[pattern.len()]
}

fn name_matches(pattern: &[char], name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    let (mut p, mut n) = (0, 0);
    // The last star, and the character that it was last tried at.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, n));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == '?' || pattern[p] == name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((at, tried)) = star {
            star = Some((at, tried + 1));
            (p, n) = (at + 1, tried + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

// === grep ===

/// Arguments of `grep`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Grep {
    /// An extended regular expression (as grep -E), or plain text with `fixed`.
    pattern: String,
    /// Absolute path of a file, or of a directory to look through. Default: /
    #[serde(default = "root")]
    path: String,
    /// Only in files with such names, for example *.py
    #[serde(default)]
    include: Option<String>,
    /// The pattern is plain text.
    #[serde(default)]
    fixed: bool,
    /// Upper and lower case are the same.
    #[serde(default)]
    ignore_case: bool,
    /// Matching lines in the answer. Default 100, at most 1000.
    #[serde(default)]
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<usize>,
}

/// Lines that match.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Matches {
    matches: Vec<Match>,
    /// There are more.
    truncated: bool,
    /// What could not be read, or that time was up.
    note: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Match {
    path: String,
    /// From 1.
    line: u64,
    text: String,
}

impl Tool for Grep {
    const NAME: &'static str = "grep";
    const TITLE: &'static str = "Search in files";
    const ABOUT: &'static str = "Search the text of files for a regular expression, in a directory and all \
        below it. Binary files are left out. Uses the sandbox's own grep.";
    const EFFECT: Effect = Effect::Reads;
    type Output = Matches;

    async fn call(self, call: &Call) -> Result<Answer> {
        pattern_checked(&self.pattern)?;
        let limit = self.limit.unwrap_or(MATCHES);
        within("limit", limit, 1, MATCHES_MAX)?;
        let path = checked(self.path.clone())?;
        let command = Command { command: self.command(path), ..Command::default() };
        let output = processes::begin(call.awake().await?, command).await?;
        let found = Search::new(limit).read(output, call).await?;
        let mut text: Vec<_> =
            found.matches.iter().map(|m| format!("{}:{}: {}", m.path, m.line, m.text)).collect();
        if found.truncated {
            text.push(format!("[… the first {} matches are shown …]", found.matches.len()));
        }
        text.extend(found.note.clone());
        if text.is_empty() {
            text.push("no match".to_owned());
        }
        Ok(Answer::new(text.join("\n"), &found))
    }
}

impl Grep {
    fn command(&self, path: String) -> Vec<String> {
        let mut command = vec!["grep".to_owned(), "-rnHI".to_owned()];
        command.push(if self.fixed { "-F" } else { "-E" }.to_owned());
        if self.ignore_case {
            command.push("-i".to_owned());
        }
        if let Some(include) = &self.include {
            command.push(format!("--include={include}"));
        }
        command.extend(["-e".to_owned(), self.pattern.clone(), "--".to_owned(), path]);
        command
    }
}

/// What grep said so far.
struct Search {
    limit: usize,
    line: Vec<u8>,
    complaint: Vec<u8>,
    found: Matches,
}

impl Search {
    fn new(limit: usize) -> Self {
        let found = Matches { matches: Vec::new(), truncated: false, note: None };
        Self { limit, line: Vec::new(), complaint: Vec::new(), found }
    }

    /// When this returns early grep is killed, because nobody reads it any more.
    async fn read(mut self, mut output: Output, call: &Call) -> Result<Matches> {
        let until = Instant::now() + SEARCH_DEADLINE;
        loop {
            let said = tokio::select! {
                said = output.next() => said?,
                () = call.cancelled.cancelled() => return Err(Error::invalid("the call was cancelled")),
                () = tokio::time::sleep_until(until) => {
                    self.found.truncated = true;
                    let note = format!("stopped after {} s: search a smaller part", SEARCH_DEADLINE.as_secs());
                    self.found.note = Some(note);
                    return Ok(self.found);
                }
            };
            match said {
                Some(Said::Bytes(OutputStream::Stdout, bytes)) => {
                    if !self.feed(&bytes) {
                        return Ok(self.found);
                    }
                }
                Some(Said::Bytes(OutputStream::Stderr, bytes)) => {
                    let room = COMPLAINT_MAX - self.complaint.len();
                    self.complaint.extend_from_slice(&bytes[..bytes.len().min(room)]);
                }
                Some(Said::Exited(exit)) => return self.ended(exit.exit_code),
                Some(Said::Skipped(_) | Said::At(_)) => {}
                None => return self.ended(None),
            }
        }
    }

    /// Whether more is wanted.
    fn feed(&mut self, bytes: &[u8]) -> bool {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = LINE_MAX - self.line.len();
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            if !part.ends_with(b"\n") {
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let Some(hit) = parse(&String::from_utf8_lossy(&line)) else { continue };
            if self.found.matches.len() == self.limit {
                self.found.truncated = true;
                return false;
            }
            self.found.matches.push(hit);
        }
        true
    }

    fn ended(mut self, code: Option<i32>) -> Result<Matches> {
        if code != Some(GREP_FAILED) {
            return Ok(self.found);
        }
        let complaint = String::from_utf8_lossy(&self.complaint).trim().to_owned();
        if self.found.matches.is_empty() {
            return Err(Error::new(ErrorCode::CommandFailed, complaint));
        }
        self.found.note = Some(complaint);
        Ok(self.found)
    }
}

/// `path:line:text`. A path may have colons, too: the first number between two ends it.
fn parse(line: &str) -> Option<Match> {
    let line = line.trim_end_matches(['\n', '\r']);
    let mut from = 0;
    loop {
        let colon = from + line[from..].find(':')?;
        let rest = &line[colon + 1..];
        if let Some((number, text)) = rest.split_once(':')
            && let Ok(number) = number.parse()
        {
            let text = text.chars().take(LINE_SHOWN).collect();
            return Some(Match { path: line[..colon].to_owned(), line: number, text });
        }
        from = colon + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_fits(pattern: &str, name: &str) -> bool {
        name_matches(&pattern.chars().collect::<Vec<_>>(), name)
    }

    #[test]
    fn names_are_compared_as_shells_do() {
        for (pattern, name) in [
            ("*.rs", "main.rs"),
            ("*", ""),
            ("*", "x"),
            ("a*b*c", "aXbYbZc"),
            ("?ä?", "xäy"),
            ("[x]", "[x]"),
        ] {
            assert!(name_fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("*.rs", "main.rc"), ("?", ""), ("a*b", "ab c"), ("", "x")] {
            assert!(!name_fits(pattern, name), "{pattern} {name}");
        }
        let (pattern, name) = ("*a".repeat(400) + "b", "a".repeat(4000));
        assert!(!name_fits(&pattern, &name), "without taking for ever");
    }

    #[test]
    fn paths_are_compared_part_by_part() {
        let fits = |pattern: &str, path: &str| Pattern::new(pattern).matches(path);
        for (pattern, path) in [
            ("src/**/*.rs", "src/a/b/c.rs"),
            ("src/**/*.rs", "src/c.rs"),
            ("**/test", "test"),
            ("**/test/**", "a/test/b"),
            ("a/*/c", "a/b/c"),
        ] {
            assert!(fits(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [("src/*.rs", "src/a/b.rs"), ("a/*/c", "a/c"), ("a/**/b", "c/b")] {
            assert!(!fits(pattern, path), "{pattern} {path}");
        }
        assert!(!fits(&"**/a/".repeat(200), &"a/".repeat(2000)[..3999].replace("a/a", "a/b")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_search_that_takes_too_long_or_that_nobody_wants_any_more_ends() {
        let (until, cancelled) = (Instant::now() + SEARCH_DEADLINE, CancellationToken::new());
        assert!(go_on(until, &cancelled).is_ok());
        cancelled.cancel();
        assert!(go_on(until, &cancelled).is_err());
        tokio::time::advance(SEARCH_DEADLINE).await;
        let late = go_on(until, &CancellationToken::new()).unwrap_err();
        assert_eq!(late.code(), ErrorCode::Timeout);
    }

    #[test]
    fn a_match_is_read_whatever_its_path_and_text() {
        let read = |line| parse(line).map(|hit| (hit.path, hit.line, hit.text));
        let hit = |path: &str, line, text: &str| Some((path.to_owned(), line, text.to_owned()));
        assert_eq!(read("/a/b.rs:12:let x: u8 = 1;\n"), hit("/a/b.rs", 12, "let x: u8 = 1;"));
        assert_eq!(read("/a:b/c:3::"), hit("/a:b/c", 3, ":"));
        assert_eq!(read("grep: hello"), None);
        assert_eq!(read(&format!("/a:1:{}", "x".repeat(9000))).unwrap().2.len(), LINE_SHOWN);
    }
}
