//! What is put into requests and answers of a preview, and whose pages may use it (CORS), as its owner says.
//!
//! Rules are checked when they are made: one that would break the connection, lie about the length of
//! a body, or touch what is ours is refused.

use std::collections::BTreeMap;

use torpor_protocol::preview::{ORIGINS_MAX, Preview, RULES_MAX, TOKEN_COOKIE, TOKEN_HEADER};

use crate::error::{Error, Result};
use crate::headers::{TRAVEL_HEADERS, is_value, name_of};

/// Longest value of a header rule: half of what servers commonly take for all headers together.
const VALUE_MAX: usize = 4096;

/// What is ours, besides what says how a message travels.
const OURS: [&str; 3] = ["x-request-id", "x-torpor-preview", TOKEN_HEADER];

/// Names in small letters, and values; an empty one takes the header away.
pub type HeaderRules = BTreeMap<String, String>;

/// The rules of a preview, known to be good.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    pub requests: HeaderRules,
    pub answers: HeaderRules,
    pub cors: Cors,
}

/// Pages of which origins may use a preview.
#[derive(Debug, Clone, Default)]
pub enum Cors {
    /// The application's own business.
    #[default]
    None,
    Everybody,
    /// In small letters.
    Origins(Vec<String>),
}

impl Rules {
    /// Refuses what can't be done.
    pub fn of(preview: &Preview) -> Result<Self> {
        Ok(Self {
            requests: parse(&preview.request_headers, "request_headers")?,
            answers: parse(&preview.response_headers, "response_headers")?,
            cors: Cors::parse(&preview.cors)?,
        })
    }

    /// Whether pages of this origin may act for whoever looks at them.
    pub fn trusts(&self, origin: &[u8]) -> bool {
        matches!(self.cors, Cors::Origins(_)) && self.cors.admits(origin)
    }
}

impl Cors {
    pub fn parse(origins: &[String]) -> Result<Self> {
        if origins.len() > ORIGINS_MAX {
            return Err(Error::invalid(format!("cors: at most {ORIGINS_MAX} origins")));
        }
        if origins.is_empty() {
            return Ok(Self::None);
        }
        if origins == ["*"] {
            return Ok(Self::Everybody);
        }
        let origins = origins.iter().map(|text| {
            is_origin(text).then(|| text.to_ascii_lowercase()).ok_or_else(|| {
                Error::invalid(format!(
                    "cors: {text:.80?} is not an origin such as https://app.example.com; `*` alone \
                     is for all"
                ))
            })
        });
        origins.collect::<Result<_>>().map(Self::Origins)
    }

    pub fn admits(&self, origin: &[u8]) -> bool {
        match self {
            Self::None => false,
            Self::Everybody => true,
            Self::Origins(origins) => {
                origins.iter().any(|known| known.as_bytes().eq_ignore_ascii_case(origin))
            }
        }
    }
}

/// Scheme and authority, nothing else.
fn is_origin(text: &str) -> bool {
    let authority = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let Some(authority) = authority else { return false };
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        Some(_) | None => (authority, None),
    };
    let named = !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    let numbered = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let numbered = numbered.is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok());
    (named || numbered) && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

pub fn parse(rules: &HeaderRules, field: &str) -> Result<HeaderRules> {
    if rules.len() > RULES_MAX {
        return Err(Error::invalid(format!("{field}: at most {RULES_MAX} headers")));
    }
    let mut headers = HeaderRules::new();
    for (name, value) in rules {
        let refuse = |why: &str| Error::invalid(format!("{field}: {name:.80?} {why}"));
        let parsed = name_of(name).ok_or_else(|| refuse("is not the name of a header"))?;
        if TRAVEL_HEADERS.contains(&&*parsed) || OURS.contains(&&*parsed) {
            return Err(refuse("can't be set: it belongs to the connection, or to us"));
        }
        if ["cookie", "set-cookie"].contains(&&*parsed) && value.contains(TOKEN_COOKIE) {
            return Err(refuse("can't have a cookie of ours"));
        }
        if value.len() > VALUE_MAX {
            return Err(refuse("has a value of more than 4096 bytes"));
        }
        let value = value.trim();
        if !is_value(value) {
            return Err(refuse("has a value with control characters"));
        }
        if headers.insert(parsed, value.to_owned()).is_some() {
            return Err(refuse("is there twice"));
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(rules: &[(&str, &str)]) -> HeaderRules {
        rules.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn rules_that_would_break_a_message_are_refused() {
        for (name, value) in [
            ("Host", "x"),
            ("content-length", "1"),
            ("Connection", "close"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("x-torpor-preview-token", "t"),
            ("a b", "x"),
            ("", "x"),
            ("x-a", "line\nbreak"),
            ("cookie", "torpor_preview=x"),
            ("set-cookie", "torpor_preview=x; Path=/"),
        ] {
            assert!(parse(&pairs(&[(name, value)]), "f").is_err(), "{name}: {value}");
        }
        assert!(parse(&pairs(&[("x-a", "1"), ("X-A", "2")]), "f").is_err());
        assert!(parse(&pairs(&[("authorization", "Bearer x"), ("x-ü", "y")]), "f").is_err());
        assert!(parse(&pairs(&[("Authorization", "Bearer ü")]), "f").is_ok());
    }

    #[test]
    fn what_is_no_origin_is_refused() {
        for text in [
            "app.example.com",
            "https://app.example.com/",
            "https://*.example.com",
            "ftp://a",
            "null",
            "",
            "https://u@a.example",
            "https://a:b",
            "https://[x]",
        ] {
            assert!(Cors::parse(&[text.to_owned()]).is_err(), "{text}");
        }
        assert!(Cors::parse(&["*".to_owned(), "https://a.example".to_owned()]).is_err());
        for text in ["http://localhost:3000", "https://[::1]:8080", "https://App.example.com"] {
            assert!(Cors::parse(&[text.to_owned()]).is_ok(), "{text}");
        }
    }
}
