//! How a value of a secret may be written: where it goes in, and where it comes back.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// Shortest piece of base64 that is looked for: a shorter one stands in other texts by chance.
const BASE64_MIN: usize = 8;

/// How a value is written where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// As it is.
    Raw,
    /// As a part of a path.
    Path,
    /// As a part of a query or a form.
    Query,
    /// Inside a string of JSON.
    Json,
}

impl Form {
    const ALL: [Self; 4] = [Self::Raw, Self::Path, Self::Query, Self::Json];

    pub(super) fn write(self, value: &str) -> Vec<u8> {
        match self {
            Self::Raw => value.as_bytes().to_vec(),
            Self::Path => percent(value, b"-._~:@!$&'()*,;="),
            Self::Query => percent(value, b"-._~"),
            Self::Json => {
                let quoted = serde_json::Value::from(value).to_string();
                quoted.as_bytes()[1..quoted.len() - 1].to_vec()
            }
        }
    }
}

/// With percent signs for all but letters, digits and these.
fn percent(value: &str, kept: &[u8]) -> Vec<u8> {
    let mut written = Vec::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || kept.contains(&byte) {
            written.push(byte);
        } else {
            written.extend_from_slice(format!("%{byte:02X}").as_bytes());
        }
    }
    written
}

/// All forms that a value is recognised in: those that it is sent in, with small digits behind percent
/// signs, as JSON of writers that escape more, and as a part of base64.
pub(super) fn all(value: &str) -> Vec<Vec<u8>> {
    let mut forms: Vec<_> = Form::ALL.iter().map(|form| form.write(value)).collect();
    forms.extend([Form::Path, Form::Query].map(|form| small_digits(form.write(value))));
    let json = String::from_utf8_lossy(&forms[3]).into_owned();
    let marks = [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026")];
    let for_pages = marks.iter().fold(json.clone(), |text, (mark, code)| text.replace(*mark, code));
    forms.push(json.replace('/', "\\/").into_bytes());
    forms.push(for_pages.into_bytes());
    forms.extend(base64(value.as_bytes()));
    forms
}

fn small_digits(mut text: Vec<u8>) -> Vec<u8> {
    for at in 0..text.len() {
        if text[at] == b'%' {
            text[at + 1..at + 3].make_ascii_lowercase();
        }
    }
    text
}

/// The digits that stand for the value alone when it is a part of what is encoded, such as the password
/// in `Basic` credentials: wherever it begins among three bytes, and in both alphabets.
fn base64(value: &[u8]) -> Vec<Vec<u8>> {
    let mut pieces = Vec::new();
    for (before, shared) in [(0, 0), (1, 2), (2, 3)] {
        let padded = [&[0; 2][..before], value].concat();
        // The last digits depend on what follows, too.
        let own = padded.len() * 8 / 6;
        for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
            let digits = engine.encode(&padded).into_bytes();
            pieces.extend(digits.get(shared..own).map(<[u8]>::to_vec));
        }
    }
    pieces.retain(|piece| piece.len() >= BASE64_MIN);
    pieces
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    fn found(value: &str, text: &str) -> bool {
        let holds = |form: &Vec<u8>| text.as_bytes().windows(form.len()).any(|part| part == form);
        all(value).iter().any(holds)
    }

    #[test]
    fn a_value_is_recognised_as_services_write_it() {
        let value = "a/b+c=\"d&e<f";
        for text in [
            value,
            "a%2Fb%2Bc%3D%22d%26e%3Cf",
            "a%2fb%2bc%3d%22d%26e%3cf",
            r#"{"k":"a/b+c=\"d&e<f"}"#,
            r#"{"k":"a\/b+c=\"d&e<f"}"#,
            r#"{"k":"a/b+c=\"d\u0026e\u003cf"}"#,
        ] {
            assert!(found(value, text), "{text}");
        }
        assert!(!found(value, "a/b+c=d&e<f"));
    }

    #[test]
    fn a_value_is_recognised_inside_of_base64() {
        let value = "\u{fb}\u{ff}-s3cr3t-value\u{fb}\u{ff}";
        for before in ["", "x", "xy", "me:", "user:"] {
            for behind in ["", "x", "xy", "xyz"] {
                let whole = format!("{before}{value}{behind}");
                for text in [STANDARD.encode(&whole), URL_SAFE_NO_PAD.encode(&whole)] {
                    assert!(found(value, &format!("Basic {text}")), "{before} {behind}");
                }
            }
        }
        assert!(base64(b"short").is_empty(), "it would be found by chance");
    }
}
