//! JSON in one form only (RFC 8785), so that what is the same has the same digest however it was written.

use std::fmt::Write as _;

use serde_json::{Map, Number, Value};

/// The canonical text of a value.
pub(crate) fn text(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value);
    out
}

/// BLAKE3 of the canonical text.
pub(crate) fn digest(value: &Value) -> String {
    blake3::hash(text(value).as_bytes()).to_hex().to_string()
}

fn write_value(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(out, number),
        Value::String(text) => write_text(out, text),
        Value::Array(values) => {
            out.push('[');
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                write_value(out, value);
            }
            out.push(']');
        }
        Value::Object(fields) => write_object(out, fields),
    }
}

fn write_object(out: &mut String, fields: &Map<String, Value>) {
    let mut sorted: Vec<_> = fields.iter().collect();
    // By UTF-16 units, which is not the order of UTF-8 bytes.
    sorted.sort_by(|(one, _), (other, _)| one.encode_utf16().cmp(other.encode_utf16()));
    out.push('{');
    for (at, (name, value)) in sorted.into_iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        write_text(out, name);
        out.push(':');
        write_value(out, value);
    }
    out.push('}');
}

/// Serde escapes what RFC 8785 escapes, and as it does.
fn write_text(out: &mut String, text: &str) {
    out.push_str(&Value::from(text).to_string());
}

/// As ECMAScript writes numbers, which are doubles there.
fn write_number(out: &mut String, number: &Number) {
    /// Above it not every integer is a double.
    const EXACT: u64 = 1 << 53;
    if number.as_i64().is_some_and(|n| n.unsigned_abs() <= EXACT) || number.as_u64() == Some(0) {
        let _ = write!(out, "{number}");
        return;
    }
    let Some(double) = number.as_f64() else { return };
    if double == 0.0 {
        out.push('0');
        return;
    }
    // The shortest digits that read as the same number, as d.ddde±n.
    let scientific = format!("{:e}", double.abs());
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let digits: String = digits.chars().filter(|c| *c != '.').collect();
    if double < 0.0 {
        out.push('-');
    }
    write_digits(out, &digits, exponent + 1);
}

/// `0.digits` times ten to the power of `point`.
fn write_digits(out: &mut String, digits: &str, point: i32) {
    let count = i32::try_from(digits.len()).unwrap_or(i32::MAX);
    let zeros = |n: i32| "0".repeat(usize::try_from(n).unwrap_or(0));
    let cut = usize::try_from(point).unwrap_or(0).min(digits.len());
    if count <= point && point <= 21 {
        let _ = write!(out, "{digits}{}", zeros(point - count));
    } else if 0 < point && point <= 21 {
        let _ = write!(out, "{}.{}", &digits[..cut], &digits[cut..]);
    } else if -6 < point && point <= 0 {
        let _ = write!(out, "0.{}{digits}", zeros(-point));
    } else {
        let (first, rest) = digits.split_at(1);
        let dot = if rest.is_empty() { "" } else { "." };
        let _ = write!(out, "{first}{dot}{rest}e{:+}", point - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(json: &str) -> String {
        text(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn numbers_are_written_as_ecmascript_writes_them() {
        let input = r#"[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001,-0.0,1e21,1e20,-5,0]"#;
        let expected =
            "[333333333.3333333,1e+30,4.5,0.002,1e-27,0,1e+21,100000000000000000000,-5,0]";
        assert_eq!(canonical(input), expected);
    }

    #[test]
    fn fields_are_sorted_by_utf16_units() {
        let input =
            r#"{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}"#;
        let sorted = "{\"\\r\":2,\"1\":4,\"\u{80}\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\u{fb33}\":3}";
        assert_eq!(canonical(input), sorted);
    }

    #[test]
    fn what_is_the_same_has_the_same_digest_and_what_differs_has_another() {
        let digest = |json: &str| digest(&serde_json::from_str(json).unwrap());
        assert_eq!(digest(r#"{"a": 1.0, "b": [true]}"#), digest(r#"{"b":[true],"a":1}"#));
        assert_ne!(digest(r#"{"a": 1}"#), digest(r#"{"a": "1"}"#));
        assert_ne!(digest(r#"{"a": "x"}"#), digest("{\"a\": \"x\u{200b}\"}"));
    }
}
