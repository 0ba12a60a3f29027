//! What people would not see: characters without a shape, and names that look like others.

use std::fmt::Write as _;

use serde_json::Value;

/// Longest name that clients take, and all its characters (MCP).
const NAME_MAX: usize = 128;

/// Whether a character shows nothing, moves what is around it, or means something to a terminal.
fn is_invisible(c: char, before: Option<char>) -> bool {
    match c {
        '\n' | '\t' => false,
        c if c.is_control() => true,
        // Makes a picture of the sign before it, where that is none of a script.
        '\u{fe0f}' => before.is_none_or(|before| before < '\u{2000}'),
        '\u{ad}'
        | '\u{34f}'
        | '\u{61c}'
        | '\u{115f}'..='\u{1160}'
        | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}'
        | '\u{3164}'
        | '\u{fe00}'..='\u{fe0e}'
        | '\u{feff}'
        | '\u{ffa0}'
        | '\u{fff0}'..='\u{fffb}'
        | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}' => true,
        _ => false,
    }
}

/// Where in a value there are such characters: the first place, for people.
pub(crate) fn invisible(value: &Value) -> Option<String> {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
        Value::String(text) => first_invisible(text),
        Value::Array(values) => values.iter().find_map(invisible),
        Value::Object(fields) => fields
            .iter()
            .find_map(|(name, value)| first_invisible(name).or_else(|| invisible(value))),
    }
}

fn first_invisible(text: &str) -> Option<String> {
    let mut before = None;
    for c in text.chars() {
        if is_invisible(c, before) {
            return Some(format!("U+{:04X}", u32::from(c)));
        }
        before = Some(c);
    }
    None
}

/// A text in which every such character is written out. Runs of tags are read, too: they hide whole sentences.
pub(crate) fn shown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut before = None;
    for c in text.chars() {
        if is_invisible(c, before) {
            let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
        } else {
            out.push(c);
        }
        before = Some(c);
    }
    out
}

/// JSON, indented, for a diff: nothing in it acts on a terminal or hides.
pub(crate) fn shown_json(value: &Value) -> String {
    shown(&serde_json::to_string_pretty(value).unwrap_or_default())
}

/// Why this can't be part of the name of a tool, if it can't.
pub(crate) fn bad_name(server: &str, name: &str) -> Option<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        let like = skeleton(name);
        return Some(format!(
            "{} has characters beyond A-Z a-z 0-9 _ - . (it reads {like})",
            shown(name)
        ));
    }
    (server.len() + 1 + name.len() > NAME_MAX)
        .then(|| format!("with the name of its server it has more than {NAME_MAX} characters"))
}

/// What a name looks like at a glance: equal for names that are taken for one another.
pub(crate) fn skeleton(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.chars().map(latin).flat_map(char::to_lowercase) {
        match c {
            '_' | '-' | '.' | ' ' => {}
            '0' => out.push('o'),
            '1' | 'i' | '|' => out.push('l'),
            '5' => out.push('s'),
            c if is_invisible(c, None) => {}
            c => out.push(c),
        }
    }
    out.replace("rn", "m").replace("vv", "w")
}

/// The Latin letter that a letter of another script looks like.
fn latin(c: char) -> char {
    match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(u32::from(c) - 0xfee0).unwrap_or(c),
        'а' | 'α' | 'Α' | 'А' => 'a',
        'В' | 'Β' | 'ь' => 'b',
        'с' | 'С' | 'ϲ' => 'c',
        'ԁ' => 'd',
        'е' | 'Е' | 'Ε' | 'ё' => 'e',
        'ɡ' => 'g',
        'һ' | 'Н' | 'Η' => 'h',
        'і' | 'І' | 'ι' | 'Ι' | 'ı' | 'ӏ' => 'i',
        'ј' | 'Ј' => 'j',
        'к' | 'К' | 'κ' | 'Κ' => 'k',
        'М' | 'Μ' | 'м' => 'm',
        'п' | 'η' | 'Ν' => 'n',
        'о' | 'О' | 'ο' | 'Ο' | 'σ' => 'o',
        'р' | 'Р' | 'ρ' | 'Ρ' => 'p',
        'ԛ' => 'q',
        'ѕ' | 'Ѕ' => 's',
        'т' | 'Т' | 'τ' | 'Τ' => 't',
        'υ' | 'ц' => 'u',
        'ν' | 'ѵ' => 'v',
        'ѡ' | 'ω' | 'ԝ' => 'w',
        'х' | 'Х' | 'χ' | 'Χ' => 'x',
        'у' | 'У' | 'γ' | 'Υ' => 'y',
        'Ζ' => 'z',
        c => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_nobody_sees_is_found_in_values_and_in_names_of_fields() {
        assert_eq!(invisible(&json!({"a": ["b", {"c": "d\u{200b}"}]})), Some("U+200B".to_owned()));
        assert_eq!(invisible(&json!({"pa\u{e0061}th": 1})), Some("U+E0061".to_owned()));
        assert_eq!(invisible(&json!("\u{1b}[2K")), Some("U+001B".to_owned()));
        assert_eq!(invisible(&json!("\u{202e}gnp")), Some("U+202E".to_owned()));
        assert_eq!(invisible(&json!("Grüße, 漢字 and ❤\u{fe0f}\n\tend")), None);
    }

    #[test]
    fn a_diff_writes_it_out() {
        let text = shown_json(&json!({"d": "ok\u{e0049}\u{1b}[8m"}));
        assert!(text.contains("ok\\u{e0049}") && !text.contains('\u{e0049}'), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn names_that_are_taken_for_one_another_have_one_skeleton() {
        for other in [
            "send-email",
            "Send_Email",
            "sendEmai1",
            "ѕend_еmail",
            "send\u{200b}_email",
            "ｓｅｎｄ_email",
        ] {
            assert_eq!(skeleton(other), skeleton("send_email"), "{other}");
        }
        assert_ne!(skeleton("send_mail"), skeleton("send_email"));
        assert!(bad_name("a", "send_еmail").unwrap().contains("sendemall"));
        assert!(bad_name("a", &"x".repeat(127)).is_some() && bad_name("a", "x.y-z_1").is_none());
    }
}
