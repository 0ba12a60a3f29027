//! A time in milliseconds, or the word `never`, which is 0 in memory as in the policy of a sandbox.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const NEVER: &str = "never";

#[derive(Deserialize)]
#[serde(untagged, expecting = "it is a number of milliseconds, or never")]
enum Given {
    Ms(u64),
    Word(String),
}

pub(super) fn serialize<S: Serializer>(ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    match ms {
        0 => NEVER.serialize(serializer),
        ms => ms.serialize(serializer),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    match Given::deserialize(d)? {
        Given::Ms(0) => Err(D::Error::custom("a time of 0 would be at once; write \"never\"")),
        Given::Ms(ms) => Ok(ms),
        Given::Word(word) if word == NEVER => Ok(0),
        Given::Word(word) => Err(D::Error::custom(format!(
            "{word:?} is neither a number of milliseconds nor \"never\""
        ))),
    }
}
