//! Words of an instruction: split at spaces outside quotes, quotes and escapes taken away, variables
//! replaced. Variables are never replaced in commands: there the shell does it.

use std::cell::Cell;

/// Longest value after replacement: what the kernel takes as one argument. Without it a value that
/// repeats itself grows without end.
const VALUE_MAX: usize = 128 * 1024;
/// All values that variables are replaced with: far more than anybody writes. Without it a long one
/// that is used on every line becomes gigabytes.
const VALUES_MAX: usize = 16 * 1024 * 1024;
/// Defaults within defaults; deeper is nobody's intention.
const DEPTH_MAX: usize = 16;

/// Splits at spaces outside quotes; quotes and escapes stay.
pub(super) fn split(text: &str, escape: char) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            (c, _) if c == escape && quote != Some('\'') => {
                word.push(c);
                word.extend(chars.next());
            }
            ('\'' | '"', None) => {
                quote = Some(c);
                word.push(c);
            }
            (c, Some(open)) => {
                if c == open {
                    quote = None;
                }
                word.push(c);
            }
            (c, None) if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            (c, None) => word.push(c),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".to_owned());
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

/// How variables are looked up.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Result<Option<String>, String>;

/// Bytes that variables were replaced with so far.
#[derive(Debug, Default)]
pub(super) struct Spent(Cell<usize>);

impl Spent {
    pub(super) fn take(&self, bytes: usize) -> Result<(), String> {
        self.0.set(self.0.get().saturating_add(bytes));
        match self.0.get() > VALUES_MAX {
            true => Err(format!("all values together become longer than {VALUES_MAX} bytes")),
            false => Ok(()),
        }
    }

    /// A copy of a value.
    pub(super) fn copy(&self, value: Option<&String>) -> Result<Option<String>, String> {
        self.take(value.map_or(0, String::len))?;
        Ok(value.cloned())
    }
}

/// Takes quotes and escapes away and replaces `$X`, `${X}`, `${X:-default}`, `${X:+other}` and the
/// same without the colon.
pub(super) fn expand(word: &str, escape: char, lookup: Lookup<'_>) -> Result<String, String> {
    let chars: Vec<char> = word.chars().collect();
    let mut expansion = Expansion { chars: &chars, at: 0, escape, lookup, depth: 0, raw: false };
    expansion.run(None)
}

/// Replaces variables only: quotes and escapes stay, as in a here-document.
pub(super) fn expand_raw(text: &str, escape: char, lookup: Lookup<'_>) -> Result<String, String> {
    let chars: Vec<char> = text.chars().collect();
    let mut expansion = Expansion { chars: &chars, at: 0, escape, lookup, depth: 0, raw: true };
    expansion.run(None)
}

struct Expansion<'a> {
    chars: &'a [char],
    at: usize,
    escape: char,
    lookup: Lookup<'a>,
    depth: usize,
    /// Quotes and escapes stand for themselves.
    raw: bool,
}

impl Expansion<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    /// Up to `end` (which is consumed) or the end of the word.
    fn run(&mut self, end: Option<char>) -> Result<String, String> {
        let mut out = String::new();
        while let Some(c) = self.peek() {
            self.at += 1;
            if Some(c) == end {
                return Ok(out);
            }
            match c {
                '\'' | '"' if self.raw => out.push(c),
                c if c == self.escape && self.raw => {
                    out.push(c);
                    out.extend(self.peek());
                    self.at += 1;
                }
                '\'' if end != Some('"') => self.literal(&mut out)?,
                '"' if end != Some('"') => out.push_str(&self.nested('"')?),
                '$' => self.variable(&mut out)?,
                c if c == self.escape => self.escaped(&mut out, end == Some('"')),
                c => out.push(c),
            }
            if out.len() > VALUE_MAX {
                return Err(format!("a value becomes longer than {VALUE_MAX} bytes"));
            }
        }
        match end {
            None => Ok(out),
            Some(end) => Err(format!("{end:?} is missing")),
        }
    }

    fn nested(&mut self, end: char) -> Result<String, String> {
        if self.depth == DEPTH_MAX {
            return Err("quotes and variables are nested too deep".to_owned());
        }
        self.depth += 1;
        let out = self.run(Some(end))?;
        self.depth -= 1;
        Ok(out)
    }

    fn literal(&mut self, out: &mut String) -> Result<(), String> {
        while let Some(c) = self.peek() {
            self.at += 1;
            if c == '\'' {
                return Ok(());
            }
            out.push(c);
        }
        Err("a quote is not closed".to_owned())
    }

    /// In double quotes only what would mean something can be escaped.
    fn escaped(&mut self, out: &mut String, quoted: bool) {
        let Some(c) = self.peek() else {
            out.push(self.escape);
            return;
        };
        self.at += 1;
        if quoted && c != '"' && c != '$' && c != self.escape {
            out.push(self.escape);
        }
        out.push(c);
    }

    fn variable(&mut self, out: &mut String) -> Result<(), String> {
        if self.peek() == Some('{') {
            self.at += 1;
            let name = self.name();
            let value = (self.lookup)(&name)?;
            out.push_str(&self.braced(&name, value)?);
            return Ok(());
        }
        let name = self.name();
        if name.is_empty() {
            out.push('$');
        } else {
            out.push_str(&(self.lookup)(&name)?.unwrap_or_default());
        }
        Ok(())
    }

    fn braced(&mut self, name: &str, value: Option<String>) -> Result<String, String> {
        if name.is_empty() {
            return Err("${…} needs the name of a variable".to_owned());
        }
        let mut value = value;
        if self.peek() == Some(':') {
            self.at += 1;
            value = value.filter(|value| !value.is_empty());
        }
        let operator = self.peek();
        self.at += 1;
        match operator {
            Some('}') => Ok(value.unwrap_or_default()),
            Some('-') => {
                let default = self.nested('}')?;
                Ok(value.unwrap_or(default))
            }
            Some('+') => {
                let other = self.nested('}')?;
                Ok(value.map(|_| other).unwrap_or_default())
            }
            Some('?') => {
                let why = self.nested('}')?;
                value.ok_or_else(|| format!("{name} is not set: {why}"))
            }
            Some(_) | None => Err(format!(
                "${{{name}…}} is not supported: only ${{{name}}}, ${{{name}:-default}}, \
                 ${{{name}:+other}} and ${{{name}:?why}}"
            )),
        }
    }

    fn name(&mut self) -> String {
        let start = self.at;
        while let Some(c) = self.peek() {
            let digit = c.is_ascii_digit() && self.at > start;
            if !(c.is_ascii_alphabetic() || c == '_' || digit) {
                break;
            }
            self.at += 1;
        }
        self.chars[start..self.at].iter().collect()
    }
}
