//! One certificate: that it is one, its text as everybody writes it, and the name under which OpenSSL
//! looks for it in a directory.
//!
//! It comes from the daemon, which made it; whatever is not of its shape is refused all the same.

use super::digest::sha1;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
/// Real ones have one or two KiB.
const TEXT_MAX: usize = 16 * 1024;
/// Letters in a line, as everybody writes them: texts of the same certificate are the same.
const LINE: usize = 64;

const INTEGER: u8 = 0x02;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const T61_STRING: u8 = 0x14;
const IA5_STRING: u8 = 0x16;
const VISIBLE_STRING: u8 = 0x1a;
const UNIVERSAL_STRING: u8 = 0x1c;
const BMP_STRING: u8 = 0x1e;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const VERSION: u8 = 0xa0;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Certificate {
    pem: String,
    der: Vec<u8>,
}

impl Certificate {
    /// The error says what is wrong with the text.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > TEXT_MAX {
            return Err("it is too long");
        }
        let body = text.trim().strip_prefix(BEGIN).and_then(|rest| rest.strip_suffix(END));
        let body = body.ok_or("it is not one PEM block of a certificate")?;
        let letters: Vec<u8> = body.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        let der = decoded(&letters).ok_or("it is not one PEM block of a certificate")?;
        subject(&der).ok_or("its content is no certificate")?;
        let mut pem = format!("{BEGIN}\n");
        for line in letters.chunks(LINE) {
            pem.extend(line.iter().map(|letter| char::from(*letter)));
            pem.push('\n');
        }
        pem.push_str(END);
        pem.push('\n');
        Ok(Self { pem, der })
    }

    /// All in a text that is nothing but certificates as [`Certificate::pem`] writes them.
    pub(super) fn parse_all(text: &str) -> Result<Vec<Self>, &'static str> {
        text.split_inclusive(&format!("{END}\n")).map(Self::parse).collect()
    }

    /// With a line end at the end.
    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    /// Tells it from every other one.
    pub(super) fn fingerprint(&self) -> String {
        sha1(&self.der).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What `openssl rehash` would call it, without the number behind the dot; none if its subject is
    /// written in a way that is rare.
    pub(super) fn subject_hash(&self) -> Option<String> {
        let canonical = canonical(subject(&self.der)?)?;
        let [a, b, c, d, ..] = sha1(&canonical);
        Some(format!("{:08x}", u32::from_le_bytes([a, b, c, d])))
    }
}

/// What Base64 stands for.
fn decoded(letters: &[u8]) -> Option<Vec<u8>> {
    if letters.is_empty() || !letters.len().is_multiple_of(4) {
        return None;
    }
    let padding = letters.iter().rev().take_while(|letter| **letter == b'=').count();
    let mut bytes = Vec::with_capacity(letters.len() / 4 * 3);
    for four in letters.chunks(4) {
        let mut bits = 0u32;
        for letter in four {
            let value = match letter {
                b'A'..=b'Z' => letter - b'A',
                b'a'..=b'z' => letter - b'a' + 26,
                b'0'..=b'9' => letter - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                b'=' => 0,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bytes.extend(&bits.to_be_bytes()[1..]);
    }
    let inside = &letters[..letters.len() - padding];
    if padding > 2 || inside.contains(&b'=') {
        return None;
    }
    bytes.truncate(bytes.len() - padding);
    Some(bytes)
}

/// One element of DER.
struct Element<'a> {
    tag: u8,
    content: &'a [u8],
    /// With its tag and length.
    whole: &'a [u8],
}

/// The first element, and what is behind it.
fn element(bytes: &[u8]) -> Option<(Element<'_>, &[u8])> {
    let (tag, length) = (*bytes.first()?, *bytes.get(1)?);
    let (begin, length) = match usize::from(length) {
        short @ 0..=0x7f => (2, short),
        // Three bytes of length are more than a certificate has.
        long @ 0x81..=0x83 => {
            let digits = bytes.get(2..2 + long - 0x80)?;
            let length = digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit));
            (2 + digits.len(), length)
        }
        _ => return None,
    };
    let end = begin.checked_add(length)?;
    let content = bytes.get(begin..end)?;
    Some((Element { tag, content, whole: &bytes[..end] }, &bytes[end..]))
}

/// The first element, which must be this.
fn expect(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (found, rest) = element(bytes)?;
    (found.tag == tag).then_some((found.content, rest))
}

/// The content of the subject; none if this is no certificate.
fn subject(der: &[u8]) -> Option<&[u8]> {
    let (certificate, behind) = expect(der, SEQUENCE)?;
    if !behind.is_empty() {
        return None;
    }
    let (to_be_signed, signature) = expect(certificate, SEQUENCE)?;
    expect(signature, SEQUENCE)?;
    let rest = expect(to_be_signed, VERSION).map_or(to_be_signed, |(_, rest)| rest);
    let (_serial, rest) = expect(rest, INTEGER)?;
    let (_algorithm, rest) = expect(rest, SEQUENCE)?;
    let (_issuer, rest) = expect(rest, SEQUENCE)?;
    let (_validity, rest) = expect(rest, SEQUENCE)?;
    let (subject, rest) = expect(rest, SEQUENCE)?;
    expect(rest, SEQUENCE)?;
    Some(subject)
}

/// A name in the form that OpenSSL compares: texts as UTF-8, in small letters, with single spaces.
fn canonical(name: &[u8]) -> Option<Vec<u8>> {
    let mut canonical = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let (part, behind) = expect(rest, SET)?;
        rest = behind;
        let (pair, more) = expect(part, SEQUENCE)?;
        let (kind, value) = element(pair)?;
        let (value, end) = element(value)?;
        // Several in one part would have to be sorted.
        if !more.is_empty() || !end.is_empty() {
            return None;
        }
        let value = match value.tag {
            UTF8_STRING | PRINTABLE_STRING | IA5_STRING | VISIBLE_STRING => {
                enclosed(UTF8_STRING, &plain(value.content))?
            }
            T61_STRING | UNIVERSAL_STRING | BMP_STRING => return None,
            _ => value.whole.to_vec(),
        };
        let pair = enclosed(SEQUENCE, &[kind.whole, &value].concat())?;
        canonical.extend(enclosed(SET, &pair)?);
    }
    (!canonical.is_empty()).then_some(canonical)
}

fn plain(text: &[u8]) -> Vec<u8> {
    let space = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0x0b;
    let words = text.split(space).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(&b' ').to_ascii_lowercase()
}

/// An element of its own; only short ones occur in names.
fn enclosed(tag: u8, content: &[u8]) -> Option<Vec<u8>> {
    let length = u8::try_from(content.len()).ok()?;
    let mut element = if length < 0x80 { vec![tag, length] } else { vec![tag, 0x81, length] };
    element.extend(content);
    Some(element)
}

#[cfg(test)]
mod tests {
    use super::super::samples::{ONE, OTHER};
    use super::*;

    #[test]
    fn a_certificate_has_the_name_that_openssl_gives_it() {
        let hash = |text| Certificate::parse(text).unwrap().subject_hash();
        // As `openssl x509 -noout -subject_hash` says.
        assert_eq!(hash(ONE).as_deref(), Some("f7516026"));
        assert_eq!(hash(OTHER).as_deref(), Some("9f811547"));
    }

    #[test]
    fn a_certificate_has_one_text_however_it_was_wrapped() {
        let usual = Certificate::parse(ONE).unwrap();
        assert_eq!(usual.pem(), ONE);
        let body = ONE.strip_prefix(BEGIN).unwrap().trim().strip_suffix(END).unwrap();
        let wrapped = format!("\n{BEGIN}\r\n{}{END}", body.replace('\n', ""));
        assert_eq!(Certificate::parse(&wrapped).unwrap(), usual);
        assert_ne!(usual.fingerprint(), Certificate::parse(OTHER).unwrap().fingerprint());
    }

    #[test]
    fn what_is_not_exactly_one_certificate_is_refused() {
        let cut = ONE.replacen(&ONE[100..104], "", 1);
        let key = ONE.replace("CERTIFICATE", "PRIVATE KEY");
        let long = format!("{BEGIN}{}{END}", "AAAA".repeat(TEXT_MAX / 4));
        let text = format!("{BEGIN}\nAAAA\n{END}\n");
        let two = format!("{ONE}{OTHER}");
        let before = format!("hello\n{ONE}");
        for wrong in ["", BEGIN, "=", &cut, &key, &long, &text, &two, &before] {
            assert!(Certificate::parse(wrong).is_err(), "{wrong}");
        }
    }
}
