//! `{{SECRET:name}}`: what stands for a secret in values of routes, and in what the code in a sandbox
//! sends.
//!
//! What replaces one is never looked through again: a value that contains a placeholder stays as it is.

use std::ops::Range;

use torpor_protocol::SecretName;
use torpor_protocol::id::SECRET_NAME_MAX;

/// How a placeholder may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Script {
    /// As it is.
    Plain,
    /// As it is, or with some of its signs as `%7B`, as programs write what they put into addresses
    /// and forms.
    Encoded,
}

/// A placeholder in a text.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    at: Range<usize>,
    name: SecretName,
}

/// The text with other things in place of the placeholders for which `put` has one; none if it stays
/// as it is.
pub(super) fn replace<E>(
    text: &[u8],
    script: Script,
    mut put: impl FnMut(&SecretName) -> Result<Option<Vec<u8>>, E>,
) -> Result<Option<Vec<u8>>, E> {
    let mut replaced: Option<Vec<u8>> = None;
    // Up to here the text is in `replaced`, if there is one.
    let mut done = 0;
    let mut from = 0;
    while let Some(found) = find(text, from, script) {
        from = found.at.end;
        if let Some(instead) = put(&found.name)? {
            let replaced = replaced.get_or_insert_default();
            replaced.extend_from_slice(&text[done..found.at.start]);
            replaced.extend_from_slice(&instead);
            done = found.at.end;
        }
    }
    if let Some(replaced) = &mut replaced {
        replaced.extend_from_slice(&text[done..]);
    }
    Ok(replaced)
}

/// The secrets that a text names.
pub(super) fn names(text: &[u8]) -> Vec<SecretName> {
    let mut names = Vec::new();
    let mut from = 0;
    while let Some(found) = find(text, from, Script::Plain) {
        from = found.at.end;
        names.push(found.name);
    }
    names
}

fn find(text: &[u8], from: usize, script: Script) -> Option<Found> {
    (from..text.len()).find_map(|start| {
        if !matches!(text[start], b'{' | b'%') {
            return None;
        }
        let (length, name) = read(&text[start..], script)?;
        Some(Found { at: start..start + length, name })
    })
}

/// The placeholder that a text begins with, and its length.
fn read(text: &[u8], script: Script) -> Option<(usize, SecretName)> {
    let mut rest = sign(text, b'{', script)?;
    rest = sign(rest, b'{', script)?;
    rest = rest.strip_prefix(b"SECRET")?;
    rest = sign(rest, b':', script)?;
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let length = rest.iter().take(SECRET_NAME_MAX + 1).take_while(|byte| word(byte)).count();
    let name = std::str::from_utf8(&rest[..length]).ok()?.parse().ok()?;
    rest = sign(&rest[length..], b'}', script)?;
    rest = sign(rest, b'}', script)?;
    Some((text.len() - rest.len(), name))
}

/// What follows a sign.
fn sign(text: &[u8], sign: u8, script: Script) -> Option<&[u8]> {
    let (first, rest) = text.split_first()?;
    if *first == sign {
        return Some(rest);
    }
    let (digits, rest) = rest.split_at_checked(2)?;
    let encoded = format!("{sign:02x}");
    let same = *first == b'%' && digits.eq_ignore_ascii_case(encoded.as_bytes());
    (script == Script::Encoded && same).then_some(rest)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn replaced(text: &str, script: Script) -> String {
        let put = |name: &SecretName| {
            Ok::<_, Infallible>(
                (name.as_str() != "OTHER").then(|| format!("<{name}>").into_bytes()),
            )
        };
        let Ok(replaced) = replace(text.as_bytes(), script, put);
        replaced.map_or(text.to_owned(), |bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn each_placeholder_is_replaced_and_the_rest_stays() {
        for (text, expected) in [
            ("", ""),
            ("no placeholder", "no placeholder"),
            ("{{SECRET:A}}", "<A>"),
            ("Bearer {{SECRET:A}} and {{SECRET:b_2}}!", "Bearer <A> and <b_2>!"),
            ("{{SECRET:A}}{{SECRET:A}}", "<A><A>"),
            ("{{{SECRET:A}}}", "{<A>}"),
            ("{{SECRET:OTHER}} {{SECRET:A}}", "{{SECRET:OTHER}} <A>"),
            (
                "{{SECRET:}} {{SECRET:2}} {{SECRET:a-b}} {{secret:A}}",
                "{{SECRET:}} {{SECRET:2}} {{SECRET:a-b}} {{secret:A}}",
            ),
            ("{{SECRET:A", "{{SECRET:A"),
            ("{{SECRET:A}", "{{SECRET:A}"),
            ("{{SECRET:{{SECRET:A}}}}", "{{SECRET:<A>}}"),
            ("%7B%7BSECRET%3AA%7D%7D", "%7B%7BSECRET%3AA%7D%7D"),
        ] {
            assert_eq!(replaced(text, Script::Plain), expected, "{text}");
        }
    }

    #[test]
    fn in_addresses_its_signs_may_be_encoded() {
        for (text, expected) in [
            ("a=%7B%7BSECRET%3AA%7D%7D&b=1", "a=<A>&b=1"),
            ("a={{SECRET%3aA%7d}", "a=<A>"),
            ("a=%7B%7BSECRET%3AA%7D%7", "a=%7B%7BSECRET%3AA%7D%7"),
            ("100%", "100%"),
            ("%7B", "%7B"),
        ] {
            assert_eq!(replaced(text, Script::Encoded), expected, "{text}");
        }
    }

    #[test]
    fn a_name_that_is_too_long_is_none() {
        let text = format!("{{{{SECRET:{}}}}}", "A".repeat(SECRET_NAME_MAX + 1));
        assert_eq!(replaced(&text, Script::Plain), text);
    }

    #[test]
    fn names_are_told_as_often_as_they_stand_there() {
        let told = names(b"{{SECRET:A}}:{{SECRET:B}}{{SECRET:A}}");
        assert_eq!(told.iter().map(SecretName::as_str).collect::<Vec<_>>(), ["A", "B", "A"]);
    }
}
