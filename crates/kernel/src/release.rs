//! The name of a kernel, `6.12.95+deb12-cloud-amd64`: what it may be, and which of two is newer.

use std::cmp::Ordering;

/// Longer than any kernel's `uname -r` can be (64), shorter than a file name.
const LENGTH_MAX: usize = 128;

/// Whether it can be the name of a directory of ours and nothing else.
pub(crate) fn is_name(text: &str) -> bool {
    let ours = |c: char| c.is_ascii_alphanumeric() || "._+~-".contains(c);
    text.len() <= LENGTH_MAX
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(ours)
}

/// Compares numbers as numbers; a candidate (`-rc3`, `~rc3`) comes before what it is a candidate for.
pub(crate) fn compare(one: &str, other: &str) -> Ordering {
    let (mut one, mut other) = (one, other);
    while !one.is_empty() || !other.is_empty() {
        let (text, rest) = split(one, |c| !c.is_ascii_digit());
        let (other_text, other_rest) = split(other, |c| !c.is_ascii_digit());
        let order = (rank(text), text).cmp(&(rank(other_text), other_text));
        if order.is_ne() {
            return order;
        }
        let (number, rest) = split(rest, |c| c.is_ascii_digit());
        let (other_number, other_rest) = split(other_rest, |c| c.is_ascii_digit());
        let order = as_number(number).cmp(&as_number(other_number));
        if order.is_ne() {
            return order;
        }
        (one, other) = (rest, other_rest);
    }
    Ordering::Equal
}

fn split(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !belongs(c)).unwrap_or(text.len()))
}

/// Candidates, then the end, then everything else.
fn rank(text: &str) -> u8 {
    match text {
        text if text.starts_with('~') || text.starts_with("-rc") => 0,
        "" => 1,
        _ => 2,
    }
}

/// Any number of digits: longer is larger, once leading zeros are gone.
fn as_number(digits: &str) -> (usize, &str) {
    let digits = digits.trim_start_matches('0');
    (digits.len(), digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_compared_as_numbers() {
        let ascending = [
            "5.10.0-9-cloud-amd64",
            "5.10.0-28-cloud-amd64",
            "6.1.0-9-cloud-amd64",
            "6.1.0-54-cloud-amd64",
            "6.9",
            "6.12",
            "6.12.0-rc2",
            "6.12.0",
            "6.12.0-1-cloud-amd64",
            "6.12.9+deb12-cloud-amd64",
            "6.12.95+deb12-cloud-amd64",
            "6.12.95+deb13-cloud-amd64",
            "10.0.0",
            "99999999999999999999999.0",
        ];
        for (at, one) in ascending.iter().enumerate() {
            for (other_at, other) in ascending.iter().enumerate() {
                assert_eq!(compare(one, other), at.cmp(&other_at), "{one} and {other}");
            }
        }
    }

    #[test]
    fn versions_of_packages_are_compared_too() {
        assert_eq!(compare("6.1.190-1", "6.12.95-1~bpo12+1"), Ordering::Less);
        assert_eq!(compare("6.12.95-1~bpo12+1", "6.12.95-1"), Ordering::Less);
        assert_eq!(compare("6.12~rc1-1", "6.12.1-1"), Ordering::Less);
        assert_eq!(compare("6.012", "6.12"), Ordering::Equal);
    }

    #[test]
    fn only_plain_names_become_directories() {
        assert!(is_name("6.12.95+deb12-cloud-amd64"));
        for bad in ["", ".", "..", ".stage-x", "-x", "a/b", "a b", "a\0", "ä", &"1".repeat(129)] {
            assert!(!is_name(bad), "{bad:?}");
        }
    }
}
