//! Paths of requests, in the one form in which they are compared.

/// The path without what different servers read differently: letters that are encoded for no reason
/// are decoded, empty and dot segments are resolved. None if it can't be said what it means: an encoded
/// slash, backslash, percent sign or control character, a semicolon (some servers cut off what follows
/// it), a bad encoding, or no slash at the beginning.
pub(crate) fn canonical(path: &str) -> Option<String> {
    if path == "*" {
        // `OPTIONS *`: the server itself.
        return Some("/".to_owned());
    }
    if !path.starts_with('/') {
        return None;
    }
    let plain = decoded(path)?;
    let mut segments: Vec<&str> = Vec::new();
    for segment in plain.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    let directory = ["/", "/.", "/.."].iter().any(|end| plain.ends_with(end));
    let end = if directory && !segments.is_empty() { "/" } else { "" };
    Some(format!("/{}{end}", segments.join("/")))
}

/// The path with what is encoded for no reason decoded, and the rest of the encodings in upper case.
fn decoded(path: &str) -> Option<String> {
    let bytes = path.as_bytes();
    let mut plain = String::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'%' => {
                let pair = path.get(at + 1..at + 3)?;
                if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                    return None;
                }
                let value = u8::from_str_radix(pair, 16).ok()?;
                match value {
                    b'/' | b'\\' | b'%' | b';' | 0..=0x1f | 0x7f => return None,
                    b'.' | b'-' | b'_' | b'~' => plain.push(char::from(value)),
                    value if value.is_ascii_alphanumeric() => plain.push(char::from(value)),
                    _ => {
                        plain.push('%');
                        plain.push_str(&pair.to_ascii_uppercase());
                    }
                }
                at += 3;
            }
            b'\\' | b';' | b'?' | b'#' | 0..=0x20 | 0x7f.. => return None,
            byte => {
                plain.push(char::from(byte));
                at += 1;
            }
        }
    }
    Some(plain)
}

/// Whether a canonical path begins with this, at the end of a segment: `/v1` begins `/v1` and `/v1/x`,
/// and not `/v10`.
pub(crate) fn begins(path: &str, prefix: &str) -> bool {
    match path.strip_prefix(prefix) {
        Some(rest) => rest.is_empty() || prefix.ends_with('/') || rest.starts_with('/'),
        None => false,
    }
}
