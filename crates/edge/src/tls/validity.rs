//! From when to when a certificate is valid: the one thing that we have to know of it ourselves.
//!
//! Reads so much of X.509 (RFC 5280, in DER) as leads there and nothing else; whether a certificate
//! is any good is for `rustls` and its peers to say.

/// Unix milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Validity {
    pub(super) from_ms: u64,
    pub(super) until_ms: u64,
}

const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// The version of a certificate, which may be left out.
const VERSION: u8 = 0xa0;

/// None: it is no certificate.
pub(super) fn of(der: &[u8]) -> Option<Validity> {
    let (certificate, _) = element(der, SEQUENCE)?;
    let (signed, _) = element(certificate, SEQUENCE)?;
    let rest = match signed.first()? {
        &VERSION => element(signed, VERSION)?.1,
        _ => signed,
    };
    let (_serial, rest) = element(rest, INTEGER)?;
    let (_algorithm, rest) = element(rest, SEQUENCE)?;
    let (_issuer, rest) = element(rest, SEQUENCE)?;
    let (validity, _) = element(rest, SEQUENCE)?;
    let (from_ms, rest) = moment(validity)?;
    let (until_ms, _) = moment(rest)?;
    Some(Validity { from_ms, until_ms })
}

/// The content of the first element, if it has this tag, and what follows it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    if found != tag {
        return None;
    }
    let (&first, mut rest) = rest.split_first()?;
    let mut length = usize::from(first);
    if first & 0x80 != 0 {
        // Three bytes of length are sixteen megabytes.
        let digits = usize::from(first & 0x7f);
        if !(1..=3).contains(&digits) || rest.len() < digits {
            return None;
        }
        let (number, after) = rest.split_at(digits);
        length = number.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        rest = after;
    }
    rest.split_at_checked(length)
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`, and what follows.
fn moment(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (text, rest, year, tail) = match *bytes.first()? {
        UTC_TIME => {
            let (text, rest) = element(bytes, UTC_TIME)?;
            let short = number(text.get(..2)?)?;
            // RFC 5280: 50 to 99 are of the last century.
            let year = if short < 50 { 2000 + short } else { 1900 + short };
            (text, rest, year, 2)
        }
        GENERALIZED_TIME => {
            let (text, rest) = element(bytes, GENERALIZED_TIME)?;
            (text, rest, number(text.get(..4)?)?, 4)
        }
        _ => return None,
    };
    let tail = text.get(tail..)?;
    if tail.len() != 11 || tail[10] != b'Z' {
        return None;
    }
    let part = |at: usize| number(&tail[at..at + 2]);
    let (month, day) = (part(0)?, part(2)?);
    let (hour, minute, second) = (part(4)?, part(6)?, part(8)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    if hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let seconds = days(year, month, day) * 86_400 + (hour * 3600 + minute * 60 + second);
    // Before 1970 is as good as 1970.
    Some((u64::try_from(seconds).unwrap_or(0) * 1000, rest))
}

fn number(digits: &[u8]) -> Option<i64> {
    digits.iter().try_fold(0, |sum, digit| {
        digit.is_ascii_digit().then(|| sum * 10 + i64::from(digit - b'0'))
    })
}

/// Days since 1970 in the Gregorian calendar. A year begins in March here, so that the day of leap
/// years is its last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    fn certificate(from: (i32, u8, u8), until: (i32, u8, u8)) -> Vec<u8> {
        let mut params = CertificateParams::new(vec!["a.example.org".to_owned()]).unwrap();
        params.not_before = date_time_ymd(from.0, from.1, from.2);
        params.not_after = date_time_ymd(until.0, until.1, until.2);
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn both_ways_to_write_a_year_are_read() {
        let found = of(&certificate((1999, 12, 31), (2050, 1, 1))).unwrap();
        assert_eq!(found.from_ms, 946_598_400_000);
        assert_eq!(found.until_ms, 2_524_608_000_000);
        let found = of(&certificate((2024, 2, 29), (2024, 3, 1))).unwrap();
        assert_eq!(found.until_ms - found.from_ms, 86_400_000);
        assert_eq!(found.from_ms, 1_709_164_800_000);
    }

    #[test]
    fn no_bytes_make_it_stumble() {
        let whole = certificate((2024, 1, 1), (2025, 1, 1));
        for length in 0..whole.len() {
            let _ = of(&whole[..length]);
        }
        let found = of(&whole);
        for at in 0..whole.len().min(200) {
            for value in [0x00, 0x7f, 0x80, 0x84, 0xff] {
                let mut bent = whole.clone();
                bent[at] = value;
                let _ = of(&bent);
            }
        }
        assert!(found.is_some());
        assert_eq!(of(b""), None);
        assert_eq!(of(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]), None);
    }
}
