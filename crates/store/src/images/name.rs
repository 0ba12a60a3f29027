//! What people call an image: `torpor/base`, `team/web:2`.

use std::fmt;
use std::str::FromStr;

use torpor_lifecycle::store::StoreError;

/// Longest name with its tag.
const NAME_MAX: usize = 128;
/// The tag of a name that has none.
const DEFAULT_TAG: &str = "latest";

/// A valid name; always with a tag.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName(String);

impl ImageName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ImageName {
    type Err = StoreError;
    fn from_str(text: &str) -> Result<Self, StoreError> {
        let bad = |why: &str| {
            let shown: String = text.chars().take(NAME_MAX).collect();
            Err(StoreError::Invalid(format!("image name {shown:?} is not valid: {why}")))
        };
        let (path, tag) = text.split_once(':').unwrap_or((text, DEFAULT_TAG));
        if path.len() + 1 + tag.len() > NAME_MAX {
            return bad("a name with its tag has at most 128 characters");
        }
        if !path.split('/').all(is_part) {
            return bad("a name consists of parts like \"web-2.0\", separated by '/': a-z, 0-9, \
                 '.', '_' and '-', first a letter or digit");
        }
        if !is_part(tag) {
            return bad("a tag consists of a-z, 0-9, '.', '_' and '-', first a letter or digit");
        }
        Ok(Self(format!("{path}:{tag}")))
    }
}

fn is_part(part: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let first = part.bytes().next().is_some_and(plain);
    first && part.bytes().all(|b| plain(b) || b"._-".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_tag_is_the_latest() {
        let name: ImageName = "torpor/base".parse().unwrap();
        assert_eq!(name.as_str(), "torpor/base:latest");
        assert_eq!(name, "torpor/base:latest".parse().unwrap());
        let name: ImageName = "web:2.0-rc_1".parse().unwrap();
        assert_eq!(name.as_str(), "web:2.0-rc_1");
    }

    #[test]
    fn hostile_names_are_refused() {
        let long = "a".repeat(129);
        let bad = [
            "", ":", "a:", ":a", "A", "a/", "/a", "a//b", "../a", "a/../b", ".a", "a b", "a\0",
            "ä", "a:b:c", "a:b/c", "a:B", "-a", "a\n", &long,
        ];
        for text in bad {
            assert!(text.parse::<ImageName>().is_err(), "{text:?} was accepted");
        }
    }
}
