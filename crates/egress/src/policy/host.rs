//! Hosts as guests write them.

/// Bytes of a name, as the name system has it.
const NAME_MAX: usize = 253;
/// Bytes between two dots.
const LABEL_MAX: usize = 63;

/// The host of `host`, `host.` or `host:port` in lower case and without a dot at the end; none if it is
/// an address, or nothing that could be the name of a host.
pub(crate) fn host_of(text: &str) -> Option<String> {
    let name = match text.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        Some(_) => return None,
        None => text,
    };
    let name = name.strip_suffix('.').unwrap_or(name);
    let label = |label: &str| {
        let fine = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        !label.is_empty() && label.len() <= LABEL_MAX && label.bytes().all(fine)
    };
    if name.len() > NAME_MAX || !name.split('.').all(label) {
        return None;
    }
    // `1.2.3.4`, and what some programs take for an address: `0x7f.1`, `2130706433`.
    let last = name.rsplit('.').next().unwrap_or_default();
    let numeric = last.bytes().all(|byte| byte.is_ascii_digit())
        || last.get(..2).is_some_and(|begin| begin.eq_ignore_ascii_case("0x"));
    (!numeric).then(|| name.to_ascii_lowercase())
}
