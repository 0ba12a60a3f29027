//! JSON that a guest wrote and that is passed on: text, known to be good, that nobody makes a tree of. A tree is many
//! times as large as the text: sixty bytes and more for a number.

use std::fmt;
use std::str::FromStr;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Levels of it. Parsers end at 128, and an answer has some of its own.
const DEPTH_MAX: usize = 100;

/// JSON as it was written. What reads answers can read it.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct JsonText(Box<RawValue>);

impl JsonText {
    pub fn as_str(&self) -> &str {
        self.0.get()
    }
}

impl FromStr for JsonText {
    type Err = serde_json::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut read = serde_json::Deserializer::from_str(text);
        Plain { levels: DEPTH_MAX }.deserialize(&mut read)?;
        read.end()?;
        RawValue::from_string(text.to_owned()).map(Self)
    }
}

impl fmt::Display for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl PartialEq for JsonText {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl<'de> Deserialize<'de> for JsonText {
    /// For who reads answers. Not as raw text: a variant with a tag is read from a tree.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        RawValue::from_string(value.to_string()).map(Self).map_err(D::Error::custom)
    }
}

/// Reads a value as a tree would be read, and keeps nothing of it.
struct Plain {
    levels: usize,
}

impl Plain {
    fn inner<E: serde::de::Error>(&self) -> Result<usize, E> {
        let deep = || E::custom(format!("more than {DEPTH_MAX} levels"));
        self.levels.checked_sub(1).ok_or_else(deep)
    }
}

impl<'de> DeserializeSeed<'de> for Plain {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Plain {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let levels = self.inner()?;
        while seq.next_element_seed(Self { levels })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let levels = self.inner()?;
        while map.next_key_seed(Self { levels })?.is_some() {
            map.next_value_seed(Self { levels })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_json_stays_as_it_was_written() {
        for text in ["{\"a\" : [1, 2.50, null, true, \"x\"]}", "7", "-0.0", "\"\\u00fc\"", "[]"] {
            let json: JsonText = text.parse().unwrap();
            assert_eq!(serde_json::to_string(&json).unwrap(), text);
        }
    }

    #[test]
    fn what_no_client_could_read_is_refused() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        for text in ["", "{", "1 2", "1e999", "\"\\ud800\"", "{1: 2}", "nul", &nested(101)] {
            assert!(text.parse::<JsonText>().is_err(), "{text}");
        }
        nested(100).parse::<JsonText>().unwrap();
    }

    #[test]
    fn who_reads_an_answer_gets_the_same_value() {
        let json: JsonText = serde_json::from_str(" {\"b\": [1]} ").unwrap();
        assert_eq!(json.as_str(), "{\"b\":[1]}");
    }
}
