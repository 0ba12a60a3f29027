//! What of an untrusted text comes into errors, logs and answers: one short line that only shows.
//!
//! A guest decides what its agent answers, what its kernel writes when it crashes and what its saved
//! files are called. Nothing of it is passed on to people but through [`Excerpt`].

use std::fmt;
use std::ops::Deref;

/// Longest excerpt, in characters, and what of it is the end of the text: the reason often stands there.
pub const EXCERPT_MAX: usize = 300;
const END: usize = 100;

/// The beginning and the end of a text, in one line. Whatever is not printable is escaped: control
/// characters, line ends, terminal escapes, directions and invisible characters.
#[derive(Clone, PartialEq, Eq)]
pub struct Excerpt(String);

impl Excerpt {
    /// Bytes that are no text show as U+FFFD.
    pub fn of(bytes: &[u8]) -> Self {
        Self::from(&*String::from_utf8_lossy(bytes))
    }
}

impl From<&str> for Excerpt {
    fn from(text: &str) -> Self {
        let whole: String = shown(text).take(EXCERPT_MAX + 1).collect();
        if whole.chars().count() <= EXCERPT_MAX {
            return Self(whole);
        }
        let cut = text.char_indices().rev().nth(END - 1).map_or(0, |(at, _)| at);
        let last: Vec<char> = shown(&text[cut..]).collect();
        let begin = whole.chars().take(EXCERPT_MAX - END - 1);
        let end = last[last.len().saturating_sub(END)..].iter().copied();
        Self(begin.chain(['…']).chain(end).collect())
    }
}

impl From<String> for Excerpt {
    fn from(text: String) -> Self {
        Self::from(&*text)
    }
}

impl Deref for Excerpt {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

fn shown(text: &str) -> impl Iterator<Item = char> {
    text.chars().flat_map(|c| {
        // Printable; they are escaped only where a text stands in quotes.
        let plain = matches!(c, '"' | '\'' | '\\');
        plain
            .then_some(c)
            .into_iter()
            .chain((!plain).then(|| c.escape_debug()).into_iter().flatten())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_short_text_stays_as_it_is() {
        let text = r#"can't open "C:\ä": no such file"#;
        assert_eq!(&*Excerpt::from(text), text);
    }

    #[test]
    fn of_a_long_text_the_beginning_and_the_end_are_shown() {
        let text = format!("/{}: no such file", "a".repeat(131_072));
        let excerpt = Excerpt::from(text);
        assert!(excerpt.starts_with("/aaa") && excerpt.ends_with("a: no such file"), "{excerpt}");
        assert_eq!(excerpt.chars().count(), EXCERPT_MAX);
    }

    #[test]
    fn what_acts_on_a_terminal_is_escaped() {
        let excerpt = Excerpt::of(b"a\x1b[2Jb\nc\x00\xff\xe2\x80\xae\xc2\x9b");
        assert_eq!(&*excerpt, "a\\u{1b}[2Jb\\nc\\0\u{fffd}\\u{202e}\\u{9b}");
    }

    proptest! {
        #[test]
        fn an_excerpt_is_one_short_printable_line(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let excerpt = Excerpt::of(&bytes);
            prop_assert!(excerpt.chars().count() <= EXCERPT_MAX);
            prop_assert!(!excerpt.chars().any(char::is_control));
        }
    }
}
