//! What goes to standard output and standard error: tables for people, JSON for machines.
//!
//! Invariants
//! - text of others (names, labels, commands, messages) passes [`plain`] before it is shown, so it
//!   can't move the cursor, recolour or retitle a terminal; only the output of the user's own
//!   commands is passed on as it is;
//! - no borders, and colours only for a person at a terminal ([`coloured`]): what is read can be cut
//!   with `awk` too;
//! - a reader that has gone is [`Error::BrokenPipe`], never a panic.

use std::fmt::{Display, Write as _};
use std::io::{self, IsTerminal, Write};

use comfy_table::{Table, presets};
use serde::Serialize;

use crate::error::{Error, Result};

/// Whether a terminal would do something with this character other than show it in its place.
fn acts_on_terminal(c: char) -> bool {
    c.is_control()
        || matches!(c,
            // Directions and invisible characters: they make a name look like another one.
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// One line of text that is shown and does nothing else.
pub(crate) fn plain(text: &str) -> String {
    escape(text, |_| false)
}

/// As [`plain`], but line ends and tabs stay.
pub(crate) fn plain_lines(text: &str) -> String {
    escape(text, |c| c == '\n' || c == '\t')
}

fn escape(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if keep(c) || !acts_on_terminal(c) => shown.push(c),
            '\n' => shown.push_str("\\n"),
            '\t' => shown.push_str("\\t"),
            '\r' => shown.push_str("\\r"),
            c => write!(shown, "{}", c.escape_unicode()).expect("a string takes any text"),
        }
    }
    shown
}

/// A command as one would type it, cut to `limit` characters.
pub(crate) fn command_line(command: &[String], limit: usize) -> String {
    let words: Vec<String> = command.iter().map(|word| quote(word)).collect();
    cut(&plain(&words.join(" ")), limit)
}

fn quote(word: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,~".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// At most `limit` characters; an ellipsis says that there were more.
pub(crate) fn cut(text: &str, limit: usize) -> String {
    if text.chars().count() <= limit {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(limit.saturating_sub(1)).collect();
    short.push('…');
    short
}

/// Labels or variables as `a=1,b=2`.
pub(crate) fn pairs(pairs: &torpor_protocol::spec::Pairs) -> String {
    let shown: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    plain(&shown.join(","))
}

/// Columns without borders. Cells must be [`plain`] already.
pub(crate) fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    lines_trimmed(&table.to_string())
}

/// `name:   value` lines, for one thing.
pub(crate) fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    let mut text = String::new();
    for (name, value) in fields {
        let name = format!("{name}:");
        writeln!(text, "{name:width$}{value}").expect("a string takes any text");
    }
    lines_trimmed(&text)
}

fn lines_trimmed(text: &str) -> String {
    let mut trimmed = String::with_capacity(text.len());
    for line in text.lines() {
        trimmed.push_str(line.trim_end());
        trimmed.push('\n');
    }
    trimmed
}

/// An API body, indented.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<()> {
    let mut text =
        serde_json::to_string_pretty(value).map_err(|error| Error::internal("no JSON", error))?;
    text.push('\n');
    print(&text)
}

/// An API body for machines, or text for people.
pub(crate) fn show<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> String,
) -> Result<()> {
    if json { self::json(value) } else { print(&text()) }
}

/// An API body for machines, or a line for people.
pub(crate) fn show_line<T: Serialize>(json: bool, value: &T, text: &str) -> Result<()> {
    if json { self::json(value) } else { line(text) }
}

/// One a line, for scripts.
pub(crate) fn ids(ids: impl Iterator<Item = impl Display>) -> Result<()> {
    print(&ids.map(|id| format!("{id}\n")).collect::<String>())
}

/// JSON in one line.
pub(crate) fn compact<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::internal("no JSON", error))
}

/// To standard output, at once.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| Error::local("write to standard output", error))
}

/// A line to standard output.
pub(crate) fn line(text: &str) -> Result<()> {
    print(&format!("{text}\n"))
}

/// Whether standard output is read by a person who likes colours (<https://no-color.org>).
pub(crate) fn coloured() -> bool {
    let refused = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|kind| kind == "dumb");
    io::stdout().is_terminal() && !refused("NO_COLOR") && !dumb
}

/// A line to standard error; nobody may be there to read it.
pub(crate) fn note(text: &str) {
    // A progress bar may be on the line; the terminal is told to begin a new one by whoever owns it.
    let _ = writeln!(io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_table_is_plain_columns() {
        let rows =
            vec![vec!["web".into(), "running".into()], vec!["a-long-name".into(), "x".into()]];
        assert_eq!(
            table(&["NAME", "STATE"], rows),
            "NAME          STATE\nweb           running\na-long-name   x\n"
        );
    }

    #[test]
    fn fields_line_up() {
        let shown = fields(&[("id", "1".into()), ("state", "running".into())]);
        assert_eq!(shown, "id:    1\nstate: running\n");
    }

    #[test]
    fn escapes_are_shown_and_not_done() {
        assert_eq!(
            plain("a\x1b[31mb\u{9b}c\u{202e}d\r\n"),
            "a\\u{1b}[31mb\\u{9b}c\\u{202e}d\\r\\n"
        );
        assert_eq!(plain_lines("a\nb\tc\x07"), "a\nb\tc\\u{7}");
        assert_eq!(plain("grüße, 世界"), "grüße, 世界");
    }

    #[test]
    fn a_command_can_be_copied_back_to_a_shell() {
        let command = ["sh", "-c", "echo 'hi' $X", ""].map(String::from);
        assert_eq!(command_line(&command, 80), r"sh -c 'echo '\''hi'\'' $X' ''");
        assert_eq!(command_line(&command, 5), "sh -…");
    }

    proptest! {
        #[test]
        fn plain_text_never_acts_on_a_terminal(text in any::<String>()) {
            prop_assert!(!plain(&text).chars().any(acts_on_terminal));
        }
    }
}
