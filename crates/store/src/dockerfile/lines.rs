//! From the text of a Dockerfile to its logical lines: comments and blank lines dropped, continuations
//! joined, here-documents taken along.

use super::DockerfileError;
use super::words;

/// A logical line and the number of the line it starts on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) number: usize,
    pub(super) text: String,
    pub(super) heredocs: Vec<Heredoc>,
}

/// The lines after `<<NAME`, up to one that is NAME alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Heredoc {
    /// The word as it was written.
    pub(super) word: String,
    pub(super) name: String,
    /// As it was written, every line with its end.
    pub(super) raw: String,
    /// `<<-`: tabs at the start of lines do not belong to it.
    pub(super) chomps: bool,
    /// The name was quoted: variables in it are not replaced.
    pub(super) literal: bool,
}

impl Heredoc {
    /// What a word opens, if it does.
    fn opened(word: &str) -> Option<Self> {
        let rest = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
        let (rest, chomps) = match rest.strip_prefix('-') {
            Some(rest) => (rest, true),
            None => (rest, false),
        };
        let name: String = rest.chars().filter(|c| !matches!(c, '"' | '\'')).collect();
        let fits = !name.is_empty() && !name.contains(['<', '(', ')', ';', '&', '|', '$']);
        let literal = name.len() != rest.len();
        let word = word.to_owned();
        fits.then(|| Self { word, name, raw: String::new(), chomps, literal })
    }

    /// Without the tabs that `<<-` takes away.
    pub(super) fn content(&self) -> String {
        if !self.chomps {
            return self.raw.clone();
        }
        self.raw.split_inclusive('\n').map(|line| line.trim_start_matches('\t')).collect()
    }

    /// Takes a line; whether it was the last.
    fn take(&mut self, line: &str) -> bool {
        let last = if self.chomps { line.trim_start_matches('\t') } else { line };
        if last == self.name {
            return true;
        }
        self.raw.push_str(line);
        self.raw.push('\n');
        false
    }
}

/// The lines, and the character that escapes.
pub(super) fn split(text: &str) -> Result<(Vec<Line>, char), DockerfileError> {
    let text = text.trim_start_matches('\u{feff}');
    let escape = escape_directive(text)?;
    let mut lines: Vec<Line> = Vec::new();
    let mut open: Option<Line> = None;
    let mut physical = text.lines().enumerate();
    while let Some((index, raw)) = physical.next() {
        let trimmed = raw.trim_start();
        if trimmed.starts_with('#') || trimmed.trim_end().is_empty() {
            continue;
        }
        let whole = raw.trim_end();
        let (part, goes_on) = match whole.strip_suffix(escape) {
            Some(part) => (part, true),
            None => (whole, false),
        };
        let mut line = match open.take() {
            Some(line) => line,
            None => Line { number: index + 1, text: String::new(), heredocs: Vec::new() },
        };
        line.text.push_str(if line.text.is_empty() { part.trim_start() } else { part });
        if goes_on {
            open = Some(line);
            continue;
        }
        line.heredocs = heredocs(&line.text, escape);
        for heredoc in &mut line.heredocs {
            if !physical.by_ref().any(|(_, raw)| heredoc.take(raw)) {
                let message = format!("<<{} has no end", heredoc.name);
                return Err(DockerfileError::new(line.number, message));
            }
        }
        lines.push(line);
    }
    lines.extend(open);
    Ok((lines, escape))
}

/// What an instruction opens; only those that take here-documents do.
fn heredocs(line: &str, escape: char) -> Vec<Heredoc> {
    let (keyword, rest) = super::instruction::keyword(line);
    if !["RUN", "COPY", "ADD"].contains(&keyword.as_str()) || !rest.contains("<<") {
        return Vec::new();
    }
    // What can't be split is the shell's business.
    let words = words::split(rest, escape).unwrap_or_default();
    words.iter().filter_map(|word| Heredoc::opened(word)).collect()
}

/// `# escape=` counts only among the directives at the very top.
fn escape_directive(text: &str) -> Result<char, DockerfileError> {
    for (index, line) in text.lines().enumerate() {
        let Some(comment) = line.trim().strip_prefix('#') else { break };
        let Some((key, value)) = comment.split_once('=') else { break };
        if !key.trim().eq_ignore_ascii_case("escape") {
            continue;
        }
        return match value.trim() {
            "\\" => Ok('\\'),
            "`" => Ok('`'),
            other => Err(DockerfileError::new(
                index + 1,
                format!("the escape character can be \\ or `, not {other:?}"),
            )),
        };
    }
    Ok('\\')
}
