//! The head of a request, as far as it takes to know the host. Whoever reads the request parses it
//! properly; here, what is odd is broken.

use super::Protocol;
use crate::policy::host_of;

/// What a connection of version 2 begins with if nobody asked whether it may.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Letters of a method.
const METHOD_MAX: usize = 32;
/// Bytes of a first line: other protocols have lines, too, and need not be waited for.
const LINE_MAX: usize = 16 * 1024;

/// The head of a request of version 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// Without the query.
    pub(crate) path: String,
    /// None: it names an address, or none.
    pub(crate) host: Option<String>,
}

/// How far the bytes were looked at.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Up to where there is no end of what is searched for.
    searched: usize,
    /// The first line is whole, and that of a request.
    request: bool,
}

impl Progress {
    /// What it is; none: more bytes are needed.
    pub(super) fn protocol(&mut self, seen: &[u8]) -> Option<Protocol> {
        if seen.starts_with(PREFACE) {
            return Some(Protocol::Http2);
        }
        if PREFACE.starts_with(seen) {
            return None;
        }
        if !self.request {
            match self.first_line(seen)? {
                true => self.request = true,
                false => return Some(Protocol::Other),
            }
        }
        let head = &seen[..self.head_end(seen)?];
        Some(parsed(head).map_or_else(Protocol::Broken, Protocol::Http))
    }

    /// Whether the first line was that of a request.
    pub(super) fn is_request(&self) -> bool {
        self.request
    }

    /// Whether the first line is that of a request; none: it is not whole.
    fn first_line(&mut self, seen: &[u8]) -> Option<bool> {
        let begin = seen.iter().take(METHOD_MAX + 1);
        let method = begin.take_while(|byte| byte.is_ascii_alphabetic()).count();
        match seen.get(method) {
            None if method <= METHOD_MAX => return None,
            Some(b' ') if (1..=METHOD_MAX).contains(&method) => {}
            None | Some(_) => return Some(false),
        }
        let rest = &seen[self.searched..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
            self.searched = seen.len();
            return (seen.len() > LINE_MAX).then_some(false);
        };
        // The end of the line may begin the end of the head.
        let line = &seen[..self.searched + end];
        self.searched = line.len();
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        Some(line.ends_with(b" HTTP/1.1") || line.ends_with(b" HTTP/1.0"))
    }

    /// Where the head ends, if it does: at the line before an empty one.
    fn head_end(&mut self, seen: &[u8]) -> Option<usize> {
        let rest = &seen[self.searched..];
        let ends = |end: &[u8]| rest.windows(end.len()).position(|bytes| bytes == end);
        match [ends(b"\n\r\n"), ends(b"\n\n")].into_iter().flatten().min() {
            Some(end) => Some(self.searched + end),
            None => {
                // All but what may be the begin of an end.
                self.searched = self.searched.max(seen.len().saturating_sub(2));
                None
            }
        }
    }
}

fn parsed(head: &[u8]) -> Result<Head, &'static str> {
    let head = std::str::from_utf8(head).map_err(|_| "its head is no text")?;
    let mut lines = head.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(_), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err("its first line is none");
    };
    let mut host = None;
    for line in lines {
        let (name, value) = line.split_once(':').ok_or("a line of its head is none")?;
        if name.is_empty() || name.contains(|letter: char| letter.is_ascii_whitespace()) {
            return Err("a line of its head is none");
        }
        if name.eq_ignore_ascii_case("host") && host.replace(value.trim()).is_some() {
            return Err("it names two hosts");
        }
    }
    let (authority, path) = target_parts(method, target)?;
    let host = authority.or(host).unwrap_or_default();
    let path = path.split(['?', '#']).next().unwrap_or_default().to_owned();
    Ok(Head { method: method.to_owned(), path, host: host_of(host) })
}

/// The authority of what is asked for, if it has one, and its path.
fn target_parts<'a>(
    method: &str,
    target: &'a str,
) -> Result<(Option<&'a str>, &'a str), &'static str> {
    if method == "CONNECT" {
        return Ok((Some(target), ""));
    }
    if target.starts_with('/') || target == "*" {
        return Ok((None, target));
    }
    let rest = target.split_once("://").map(|(_, rest)| rest).ok_or("it asks for nothing")?;
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    match authority.contains('@') {
        true => Err("it names a user"),
        false => Ok((Some(authority), path)),
    }
}
