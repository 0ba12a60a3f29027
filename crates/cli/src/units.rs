//! Sizes, durations and times: as people write them, and as they like to read them. Pure.

use std::time::Duration;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

const MIB: u64 = 1024 * 1024;

/// A size such as `512m`, `1g`, `1.5GiB`, in MiB. The unit is needed: `512` could mean anything.
pub(crate) fn parse_mib(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number
        .parse()
        .map_err(|_| "a size is a number and a unit, such as 512m or 1g".to_owned())?;
    let mib = match unit.to_ascii_lowercase().as_str() {
        "k" | "kb" | "kib" => number / 1024.0,
        "m" | "mb" | "mib" => number,
        "g" | "gb" | "gib" => number * 1024.0,
        "t" | "tb" | "tib" => number * 1024.0 * 1024.0,
        "" => return Err(format!("say the unit: {text}m (MiB) or {text}g (GiB)")),
        _ => return Err("the units of sizes are k, m, g and t".to_owned()),
    };
    if !(1.0..=1e12).contains(&mib) {
        return Err("that is less than 1m, or more than any computer has".to_owned());
    }
    Ok(mib.ceil() as u64)
}

/// Bytes in a second, such as `500k`, `10mb/s`, `1.5GiB/s`.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    let size = text.strip_suffix("/s").unwrap_or(text);
    let digits = size.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(size.len());
    let (number, unit) = size.split_at(digits);
    let bad = || "a rate is a number and a unit of bytes, such as 500k, 10mb/s or 1g".to_owned();
    let number: f64 = number.parse().map_err(|_| bad())?;
    let factor: f64 = match unit.to_ascii_lowercase().as_str() {
        "k" | "kb" | "kib" => 1024.0,
        "m" | "mb" | "mib" => 1024.0 * 1024.0,
        "g" | "gb" | "gib" => 1024.0 * 1024.0 * 1024.0,
        _ => return Err(bad()),
    };
    let bytes = number * factor;
    // No network is faster.
    if !(1.0..=1e15).contains(&bytes) {
        return Err(bad());
    }
    Ok(bytes as u64)
}

/// A duration such as `500ms`, `30s`, `1h30m`, `7d`, `2w`; a bare number is seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    let bad = || "a duration is such as 500ms, 30s, 1h30m, 7d or 2w".to_owned();
    let mut rest = text;
    let mut millis: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let factor: u64 = match &rest[..letters] {
            "ms" => 1,
            "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "w" => 7 * 86_400_000,
            _ => return Err(bad()),
        };
        let part = number.checked_mul(factor).ok_or_else(bad)?;
        millis = millis.checked_add(part).ok_or_else(bad)?;
        rest = &rest[letters..];
    }
    if text.is_empty() { Err(bad()) } else { Ok(Duration::from_millis(millis)) }
}

/// `2027-01-31T12:00:00Z` or `2027-01-31` (its first second, UTC), as Unix seconds.
pub(crate) fn parse_time(text: &str) -> Result<u64, String> {
    let moment = match text.parse::<Timestamp>() {
        Ok(moment) => moment,
        Err(_) => {
            let date = text
                .parse::<Date>()
                .map_err(|_| "a time is such as 2027-01-31 or 2027-01-31T12:00:00Z".to_owned())?;
            date.to_zoned(TimeZone::UTC).map_err(|error| error.to_string())?.timestamp()
        }
    };
    u64::try_from(moment.as_millisecond()).map_err(|_| "that was before 1970".to_owned())
}

/// Permission bits as everybody writes them: octal.
pub(crate) fn show_mode(mode: u32) -> String {
    format!("{:04o}", mode & 0o7777)
}

/// A number of bytes: `0 B`, `1.5 MiB`.
pub(crate) fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A size that was given in MiB: `512 MiB`, `1 GiB`, `1.5 GiB`.
pub(crate) fn show_mib(mib: u64) -> String {
    if mib < 1024 {
        return format!("{mib} MiB");
    }
    show_bytes(mib.saturating_mul(MIB)).replace(".0 ", " ")
}

/// How long something is or was: two units at most, such as `1h 5m`, `3d`, `12s`.
pub(crate) fn show_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let two = |major: u64, a: &str, minor: u64, b: &str| match minor {
        0 => format!("{major}{a}"),
        _ => format!("{major}{a} {minor}{b}"),
    };
    match seconds {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3_600 => two(seconds / 60, "m", seconds % 60, "s"),
        3_600..86_400 => two(seconds / 3_600, "h", seconds % 3_600 / 60, "m"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3_600, "h"),
    }
}

/// A short time: `0.8 ms`, `35 ms`, `1.2 s`, `2m 5s`.
pub(crate) fn show_millis(millis: f64) -> String {
    match millis.max(0.0) {
        millis if millis < 9.95 => format!("{millis:.1} ms"),
        millis if millis < 999.5 => format!("{millis:.0} ms"),
        millis if millis < 59_950.0 => format!("{:.1} s", millis / 1000.0),
        millis => show_duration(Duration::from_millis(millis as u64)),
    }
}

/// How long ago `then` was, in its largest unit: `now`, `12s`, `5m`, `3h`, `40d`.
pub(crate) fn show_age(then_ms: u64, now_ms: u64) -> String {
    match now_ms.saturating_sub(then_ms) / 1000 {
        0 => "now".to_owned(),
        seconds @ 1..60 => format!("{seconds}s"),
        seconds @ 60..3_600 => format!("{}m", seconds / 60),
        seconds @ 3_600..86_400 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// A moment, to the second, UTC: `2027-01-31T12:00:00Z`.
pub(crate) fn show_time(unix_ms: u64) -> String {
    let whole = SignedDuration::from_secs(i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX));
    match Timestamp::from_duration(whole) {
        Ok(moment) => moment.to_string(),
        Err(_) => format!("{unix_ms} ms"),
    }
}

/// A moment, to the millisecond, UTC: `2027-01-31T12:00:00.250Z`.
pub(crate) fn show_stamp(unix_us: u64) -> String {
    match Timestamp::from_microsecond(i64::try_from(unix_us).unwrap_or(i64::MAX)) {
        Ok(moment) => format!("{moment:.3}"),
        Err(_) => format!("{unix_us} us"),
    }
}

/// In milliseconds, as the API has durations.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The present, Unix milliseconds.
pub(crate) fn now_ms() -> u64 {
    u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let good = [("512m", 512), ("1g", 1024), ("1.5GiB", 1536), ("2048k", 2), ("1T", 1 << 20)];
        for (text, mib) in good {
            assert_eq!(parse_mib(text), Ok(mib), "{text}");
        }
        for text in ["", "g", "1x", "-1g", "1 g", "100k", "1e9g", "nang", "99999999999999t"] {
            assert!(parse_mib(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn a_size_without_unit_is_refused_with_the_remedy() {
        assert_eq!(parse_mib("512").unwrap_err(), "say the unit: 512m (MiB) or 512g (GiB)");
    }

    #[test]
    fn durations_are_read_as_people_write_them() {
        let good = [
            ("30s", 30_000),
            ("45", 45_000),
            ("500ms", 500),
            ("1h30m", 5_400_000),
            ("7d", 604_800_000),
            ("2w", 1_209_600_000),
            ("0s", 0),
        ];
        for (text, millis) in good {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "5x", "-1s", "1.5h", "1h 3m", "5 s", "99999999999999999d"] {
            assert!(parse_duration(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn times_are_dates_or_moments() {
        assert_eq!(parse_time("1970-01-02"), Ok(86_400_000));
        assert_eq!(parse_time("1970-01-01T00:01:00Z"), Ok(60_000));
        assert_eq!(parse_time("1970-01-01T02:00:00+02:00"), Ok(0));
        for text in ["", "tomorrow", "2027-13-01", "2027-02-30", "1969-12-31"] {
            assert!(parse_time(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn numbers_are_shown_short() {
        assert_eq!(show_bytes(0), "0 B");
        assert_eq!(show_bytes(1536), "1.5 KiB");
        assert_eq!(show_bytes(MIB - 1), "1.0 MiB");
        assert_eq!(show_mib(512), "512 MiB");
        assert_eq!(show_mib(10_240), "10 GiB");
        assert_eq!(show_duration(Duration::from_secs(3_660)), "1h 1m");
        assert_eq!(show_duration(Duration::from_millis(20)), "20ms");
        let times = [0.84, 34.9, 999.4, 1_234.0, 125_000.0].map(show_millis);
        assert_eq!(times, ["0.8 ms", "35 ms", "999 ms", "1.2 s", "2m 5s"]);
        assert_eq!(show_age(1_000, 1_500), "now");
        assert_eq!(show_age(0, 90_000_000), "1d");
        assert_eq!(show_age(5_000, 0), "now");
        assert_eq!(show_time(1_000), "1970-01-01T00:00:01Z");
        assert_eq!(show_stamp(1_250_999), "1970-01-01T00:00:01.250Z");
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in "\\PC{0,24}") {
            let _ = (parse_mib(&text), parse_duration(&text), parse_time(&text));
        }

        #[test]
        fn no_number_makes_a_display_panic(a in any::<u64>(), b in any::<u64>()) {
            let _ = (show_bytes(a), show_mib(a), show_age(a, b), show_time(a));
            let _ = show_stamp(a);
            let _ = show_duration(Duration::from_millis(a));
        }
    }
}
