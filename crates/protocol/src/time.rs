//! How times are written: instants as RFC 3339 in UTC, durations in milliseconds, and `null` for what never
//! comes. In memory an instant is Unix milliseconds; these are for serde's `with`.
//!
//! Data of older versions has instants as numbers, and is read, too.

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The last instant that can be written, 9999-12-30T22:00:00.999Z: what is later is for ever.
pub const FOREVER_MS: u64 = 253_402_207_200_999;

/// An instant, to the millisecond: later ones sort after earlier ones.
pub fn text(at_ms: u64) -> String {
    let ms = i64::try_from(at_ms.min(FOREVER_MS)).unwrap_or(0);
    format!("{:.3}", Timestamp::from_millisecond(ms).unwrap_or(Timestamp::MAX))
}

/// An instant as people and programs write it; what is before 1970 is 1970.
pub fn parse(text: &str) -> Result<u64, String> {
    let parsed: Timestamp = text
        .parse()
        .map_err(|_| format!("{text:.80} is not a time such as 2027-01-15T08:00:00Z (RFC 3339)"))?;
    Ok(u64::try_from(parsed.as_millisecond()).unwrap_or(0))
}

/// An instant where a value of its own stands for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
#[serde(transparent)]
pub struct Instant(#[serde(with = "instant")] pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Millis(u64),
}

impl Written {
    fn millis<E: serde::de::Error>(self) -> Result<u64, E> {
        match self {
            Self::Text(text) => parse(&text).map_err(E::custom),
            Self::Millis(ms) => Ok(ms),
        }
    }
}

/// `#[serde(with = "time::instant")]` of a `u64`.
pub mod instant {
    use super::{Deserialize, Deserializer, Serializer, Written};

    pub fn serialize<S: Serializer>(at_ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::text(*at_ms))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
        Written::deserialize(d)?.millis()
    }
}

/// `#[serde(with = "time::maybe")]` of an `Option<u64>`.
pub mod maybe {
    use super::{Deserialize, Deserializer, Serialize, Serializer, Written};

    pub fn serialize<S: Serializer>(at_ms: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
        at_ms.map(super::text).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
        Option::<Written>::deserialize(d)?.map(Written::millis).transpose()
    }
}

/// `#[serde(with = "time::signed")]` of an `i64`, for files that are older than 1970.
pub mod signed {
    use super::{Deserialize, Deserializer, Serializer, Timestamp};
    use serde::de::Error as _;

    pub fn serialize<S: Serializer>(at_ms: &i64, serializer: S) -> Result<S::Ok, S::Error> {
        let clamped = (*at_ms).clamp(Timestamp::MIN.as_millisecond(), super::FOREVER_MS as i64);
        let instant = Timestamp::from_millisecond(clamped).unwrap_or(Timestamp::UNIX_EPOCH);
        serializer.collect_str(&format_args!("{instant:.3}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<i64, D::Error> {
        let text = String::deserialize(d)?;
        let parsed: Timestamp = text.parse().map_err(D::Error::custom)?;
        Ok(parsed.as_millisecond())
    }
}

/// `#[serde(with = "time::micros")]` of Unix microseconds.
pub mod micros {
    use super::{Deserialize, Deserializer, Serializer, Timestamp};
    use serde::de::Error as _;

    pub fn serialize<S: Serializer>(at_us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        let us = i64::try_from(*at_us).unwrap_or(i64::MAX);
        let instant = Timestamp::from_microsecond(us).unwrap_or(Timestamp::MAX);
        serializer.collect_str(&format_args!("{instant:.6}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
        let text = String::deserialize(d)?;
        let parsed: Timestamp = text.parse().map_err(D::Error::custom)?;
        Ok(u64::try_from(parsed.as_microsecond()).unwrap_or(0))
    }
}

/// `#[serde(with = "time::never")]` of a duration whose 0 in memory is never: `null` when written.
pub mod never {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        Some(*ms).filter(|ms| *ms > 0).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
        Ok(Option::deserialize(d)?.unwrap_or(0))
    }
}

/// For a duration that may be absent (as it is, or the default), `null` (never) or a number, which is not 0.
pub fn given<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Option<u64>>, D::Error> {
    match Option::deserialize(d)? {
        Some(0) => Err(serde::de::Error::custom("a time of 0 would be at once; null is never")),
        given => Ok(Some(given)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Times {
        #[serde(rename = "at", alias = "at_ms", with = "instant")]
        at_ms: u64,
        #[serde(rename = "until", default, with = "maybe")]
        until_ms: Option<u64>,
        #[serde(rename = "file", with = "signed")]
        file_ms: i64,
        #[serde(with = "never")]
        idle_ms: u64,
    }

    #[test]
    fn times_are_written_as_people_write_them_and_read_back() {
        let times = Times { at_ms: 1_800_000_000_250, until_ms: None, file_ms: -1, idle_ms: 0 };
        let text = serde_json::to_string(&times).unwrap();
        assert_eq!(
            text,
            r#"{"at":"2027-01-15T08:00:00.250Z","until":null,"file":"1969-12-31T23:59:59.999Z","idle_ms":null}"#
        );
        assert_eq!(serde_json::from_str::<Times>(&text).unwrap(), times);
    }

    #[test]
    fn numbers_of_older_data_are_read_and_the_far_future_is_for_ever() {
        let old = r#"{"at_ms":7,"until":9,"file":"1970-01-01T00:00:00Z","idle_ms":0}"#;
        let old: Times = serde_json::from_str(old).unwrap();
        assert_eq!((old.at_ms, old.until_ms, old.idle_ms), (7, Some(9), 0));
        assert_eq!(parse(&text(u64::MAX)), Ok(FOREVER_MS));
        assert!(parse("tomorrow").is_err() && parse("1800000000").is_err());
    }
}
