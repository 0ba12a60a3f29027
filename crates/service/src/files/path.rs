//! Paths and permission bits, as clients write them.

use serde::Deserialize;
use serde::de::Error;

/// Longest path that Linux takes.
const PATH_MAX: usize = 4096;

/// A path that a guest's kernel could take.
#[derive(Debug)]
pub struct PathText(pub String);

impl PathText {
    pub fn new(text: String) -> Result<Self, &'static str> {
        match text {
            text if text.is_empty() => Err("path is empty"),
            text if text.contains('\0') => Err("path contains NUL"),
            text if !text.starts_with('/') => Err("path is not absolute"),
            text if text.len() >= PATH_MAX => Err("path is longer than 4095 bytes"),
            text => Ok(Self(text)),
        }
    }
}

impl<'de> Deserialize<'de> for PathText {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(d)?).map_err(D::Error::custom)
    }
}

/// Permission bits, written in octal.
#[derive(Debug)]
pub struct Mode(pub u32);

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let mode = u32::from_str_radix(&text, 8).ok().filter(|mode| *mode <= 0o7777);
        mode.map(Self).ok_or_else(|| D::Error::custom("mode is not octal, like 0644"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_no_kernel_takes_is_refused() {
        for bad in ["", "/a\0b", "relative", "../x", &"/".repeat(4096)] {
            assert!(PathText::new(bad.to_owned()).is_err(), "{bad:?}");
        }
        for good in ["/", "/../x", "/a\nb", "/ä", &"/".repeat(4095)] {
            assert!(PathText::new(good.to_owned()).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_mode_is_octal() {
        let parse = |text: &str| {
            serde_json::from_value::<Mode>(serde_json::Value::from(text)).map(|mode| mode.0)
        };
        assert_eq!(parse("0644").unwrap(), 0o644);
        assert_eq!(parse("755").unwrap(), 0o755);
        for bad in ["", "888", "rw", "10000", "-1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
