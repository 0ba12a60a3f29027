//! From the text of a Dockerfile to its logical lines: comments and blank lines dropped,
//! continuations joined.

use super::DockerfileError;

/// A logical line and the number of the line it starts on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) number: usize,
    pub(super) text: String,
}

/// The lines, and the character that escapes.
pub(super) fn split(text: &str) -> Result<(Vec<Line>, char), DockerfileError> {
    let escape = escape_directive(text)?;
    let mut lines: Vec<Line> = Vec::new();
    let mut open: Option<Line> = None;
    for (index, raw) in text.lines().enumerate() {
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
            None => Line { number: index + 1, text: String::new() },
        };
        line.text.push_str(if line.text.is_empty() { part.trim_start() } else { part });
        if goes_on {
            open = Some(line);
        } else {
            lines.push(line);
        }
    }
    lines.extend(open);
    Ok((lines, escape))
}

/// `# escape=` counts only among the comments at the very top.
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
