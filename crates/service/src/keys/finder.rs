//! Finds our keys in a request that goes into a sandbox, wherever they stand in it.
//!
//! A key that was made here is known by how it begins. The configured one may be any text, and only its
//! hash is compared: a rolling hash with a secret base says which pieces of a text are worth a SHA-256.
//! How long a look takes tells nothing about the key.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use subtle::ConstantTimeEq;

use super::{Digest, hash_bytes};

/// How keys that are made here begin, and how many digits make one worth hiding; they have 64.
const MADE: &[u8] = b"tpk_";
const MADE_DIGITS: usize = 32;
const BASIC: &[u8] = b"basic ";

pub(super) struct Finder {
    configured: Option<Configured>,
}

/// What is known of the configured key.
struct Configured {
    hash: Digest,
    length: usize,
    base: u64,
    /// Of the key.
    rolling: u64,
    /// `base` to the power of the length: what the oldest byte counts for.
    oldest: u64,
}

impl Finder {
    pub(super) fn new(configured: Option<&str>) -> Self {
        Self { configured: configured.map(|key| Configured::new(key.as_bytes())) }
    }

    /// Whether a key is in it, as it is, percent-encoded, or as the password of a `Basic` header.
    pub(super) fn is_in(&self, text: &[u8]) -> bool {
        let basic = text.get(..BASIC.len()).is_some_and(|it| it.eq_ignore_ascii_case(BASIC));
        let password =
            if basic { STANDARD.decode(text[BASIC.len()..].trim_ascii()).ok() } else { None };
        self.is_plainly_in(text)
            || matches!(decoded(text), Cow::Owned(text) if self.is_plainly_in(&text))
            || password.is_some_and(|text| self.is_plainly_in(&text))
    }

    fn is_plainly_in(&self, text: &[u8]) -> bool {
        text.windows(MADE.len() + MADE_DIGITS).any(is_made)
            || self.configured.as_ref().is_some_and(|key| key.is_in(text))
    }
}

impl Configured {
    fn new(key: &[u8]) -> Self {
        let mut base = [0; 8];
        getrandom::fill(&mut base).expect("the system has entropy");
        let base = u64::from_le_bytes(base) | 1;
        let rolling = key.iter().fold(0, |sum, byte| roll(sum, base, *byte));
        let oldest = key.iter().fold(1u64, |power, _| power.wrapping_mul(base));
        Self { hash: hash_bytes(key), length: key.len(), base, rolling, oldest }
    }

    fn is_in(&self, text: &[u8]) -> bool {
        let mut sum = 0;
        for (index, byte) in text.iter().enumerate() {
            sum = roll(sum, self.base, *byte);
            let begin = (index + 1).checked_sub(self.length);
            if let Some(before) = begin.and_then(|begin| begin.checked_sub(1)) {
                let gone = u64::from(text[before]).wrapping_add(1);
                sum = sum.wrapping_sub(self.oldest.wrapping_mul(gone));
            }
            let piece = begin.map(|begin| &text[begin..=index]);
            if piece.is_some_and(|piece| sum == self.rolling && self.is(piece)) {
                return true;
            }
        }
        false
    }

    fn is(&self, piece: &[u8]) -> bool {
        self.hash.ct_eq(&hash_bytes(piece)).into()
    }
}

fn is_made(piece: &[u8]) -> bool {
    piece.strip_prefix(MADE).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
}

/// Adding one tells zeros apart.
fn roll(sum: u64, base: u64, byte: u8) -> u64 {
    sum.wrapping_mul(base).wrapping_add(u64::from(byte).wrapping_add(1))
}

/// Without percent-encoding; what is none stays as it is.
fn decoded(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.contains(&b'%') {
        return Cow::Borrowed(text);
    }
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match byte.filter(|_| *first == b'%') {
            Some(byte) => {
                plain.push(byte);
                rest = &after[2..];
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "plain+secret of mine=";
    const MADE_KEY: &str = "tpk_0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn found(text: &str) -> bool {
        Finder::new(Some(KEY)).is_in(text.as_bytes())
    }

    #[test]
    fn a_key_is_found_wherever_it_stands() {
        let basic = format!("bAsIc {}", STANDARD.encode(format!("user:{KEY}")));
        for text in [
            format!("Bearer {KEY}"),
            format!("bearer   {KEY}"),
            KEY.to_owned(),
            basic,
            format!("Token {MADE_KEY}"),
            format!("other, {KEY}"),
            format!("<{KEY}>"),
            format!("a=1; key={KEY}; b=2"),
            "key=plain%2Bsecret%20of%20mine%3d".to_owned(),
            "https://h/?k=plain%2bsecret%20of%20mine=".to_owned(),
            format!("/{MADE_KEY}/x"),
            format!("/?{}", MADE_KEY.replace('p', "%70")),
        ] {
            assert!(found(&text), "{text}");
        }
    }

    #[test]
    fn what_is_no_key_of_ours_stays() {
        for text in [
            "Bearer mine",
            "",
            "%",
            "%zz",
            "plain+secret of mine",
            "tpk_logo",
            "Basic !!",
            "/tpk_logo.png",
            "/a%20b?c=%25",
        ] {
            assert!(!found(text), "{text}");
        }
    }

    #[test]
    fn a_text_is_searched_to_its_end() {
        let finder = Finder::new(Some(KEY));
        for before in 0..40 {
            let text = [&b"x".repeat(before), KEY.as_bytes()].concat();
            assert!(finder.is_in(&text), "{before}");
            assert!(!finder.is_in(&text[..text.len() - 1]), "{before}");
        }
    }
}
