//! Headers of HTTP messages that policies and previews speak of, as text.

/// Headers that say how a request travels, not what it is: whoever sends it on writes them itself.
pub const TRAVEL_HEADERS: [&str; 13] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A header's name in small letters, if the text is one: a token of RFC 9110.
pub fn name_of(text: &str) -> Option<String> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (!text.is_empty() && text.bytes().all(is_token)).then(|| text.to_ascii_lowercase())
}

/// Whether a text can be the value of a header: no control characters.
pub fn is_value(text: &str) -> bool {
    text.bytes().all(|byte| byte == b'\t' || (byte >= 32 && byte != 127))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_tokens_and_values_have_no_control_characters() {
        assert_eq!(name_of("X-Api-Key").as_deref(), Some("x-api-key"));
        for text in ["", "a b", "a:b", "x-ü", "a\n"] {
            assert_eq!(name_of(text), None, "{text:?}");
        }
        assert!(is_value("Bearer ü\t") && is_value(""));
        assert!(!is_value("line\nbreak") && !is_value("a\0") && !is_value("\u{7f}"));
    }
}
