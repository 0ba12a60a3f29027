//! Previews: addresses of ports inside sandboxes, with a say in who may come and what is put into
//! requests and answers on the way.
//!
//! A preview has a label, the first part of the host names it is found under. It stays the same
//! whatever becomes of its sandbox: asleep, renamed, moved to another port.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::id::{BadName, Name, PreviewId, SandboxId, ServiceId, TokenId, text_type};
use crate::page::page;
use crate::time;

/// Opens a private preview, as a header.
pub const TOKEN_HEADER: &str = "x-torpor-preview-token";
/// The same in the query of a URL; a browser gets a cookie for it.
pub const TOKEN_QUERY: &str = "torpor_preview_token";
/// The cookie that a browser then has.
pub const TOKEN_COOKIE: &str = "torpor_preview";

/// Header rules in each direction.
pub const RULES_MAX: usize = 64;
/// Origins that may use a preview from their pages.
pub const ORIGINS_MAX: usize = 64;

/// Length of a random label: 128 bits in base 32.
const RANDOM_LEN: usize = 26;
/// Longest label that people choose; shorter than a DNS label, so that a dialect can add to it.
const LABEL_MAX: usize = 48;
const BASE32: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// First parts of host names that mean, or may come to mean, something else.
const RESERVED: [&str; 8] = ["admin", "api", "auth", "localhost", "mail", "ns", "torpor", "www"];

text_type!(
    PreviewLabel,
    "The first part of a preview's host names: a DNS label that starts with a letter, so it is never\n\
     taken for `<port>-<sandbox>`; or, if nobody chose it, 26 letters and digits that nobody guesses."
);

impl PreviewLabel {
    /// One that nobody guesses.
    pub fn random() -> Self {
        let mut bytes = [0u8; RANDOM_LEN];
        getrandom::fill(&mut bytes).expect("the system has entropy");
        // 32 divides 256, so each character is as likely as any other: 130 bits of them.
        let text = bytes.iter().map(|byte| char::from(BASE32[usize::from(byte % 32)])).collect();
        Self(text)
    }

    /// Whether it may be one that nobody chose.
    pub fn looks_random(&self) -> bool {
        looks_random(&self.0)
    }
}

fn looks_random(text: &str) -> bool {
    text.len() == RANDOM_LEN && text.bytes().all(|b| BASE32.contains(&b))
}

impl FromStr for PreviewLabel {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = |why| Err(BadName::new("prefix", text, why));
        if looks_random(text) {
            return Ok(Self(text.to_owned()));
        }
        if text.is_empty() || text.len() > LABEL_MAX {
            return bad("a prefix has 1 to 48 characters");
        }
        if !text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
            return bad("a prefix consists of a-z, 0-9 and '-'");
        }
        if !text.starts_with(|c: char| c.is_ascii_lowercase()) || text.ends_with('-') {
            return bad("a prefix starts with a letter and does not end with '-'");
        }
        if text.starts_with("xn--") {
            return bad("it would be taken for a name in another script");
        }
        if RESERVED.contains(&text) {
            return bad("it is reserved: add something to it");
        }
        Ok(Self(text.to_owned()))
    }
}

/// Where a preview leads: `"sandbox": ID` or `"service": ID` in its body.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PreviewTarget {
    Sandbox(SandboxId),
    /// One of its instances.
    Service(ServiceId),
}

/// An address of a port inside a sandbox, or of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Preview {
    pub id: PreviewId,
    /// Tells it from others of the same sandbox; of a service: `main`, or a tag of its traffic.
    pub name: Name,
    #[serde(flatten)]
    pub target: PreviewTarget,
    /// Of a service: that of its first revision; each revision has its own.
    #[cfg_attr(feature = "openapi", schema(value_type = u16, minimum = 1))]
    pub port: NonZeroU16,
    /// Whether everybody may come; otherwise a token or an API key is needed.
    pub public: bool,
    /// The first part of its host names.
    pub label: PreviewLabel,
    /// Whether somebody chose the label.
    pub prefix: bool,
    /// Where it is found, the best one first.
    #[serde(default)]
    pub urls: Vec<String>,
    /// From then on it is not found any more; absent: it lives as long as its
    /// sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "expires_at", alias = "expires_at_ms", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at_ms: Option<u64>,
    /// Put into every request on its way in, whatever the client sent.
    #[serde(default)]
    pub request_headers: BTreeMap<String, String>,
    /// Put into every answer on its way out, whatever the application sent; an empty value takes the
    /// header away.
    #[serde(default)]
    pub response_headers: BTreeMap<String, String>,
    /// Origins whose pages may use it from a browser, such as `https://app.example.com`; `*`: all,
    /// without credentials.
    #[serde(default)]
    pub cors: Vec<String>,
    /// Whether WebSockets that are silent stay open while the sandbox sleeps, and wake it with the next
    /// byte.
    #[serde(default)]
    pub keep_open: bool,
    #[serde(rename = "created_at", alias = "created_at_ms", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "updated_at", alias = "updated_at_ms", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub updated_at_ms: u64,
}

impl Preview {
    pub fn is_expired(&self, now_ms: u64) -> bool {
        self.expires_at_ms.is_some_and(|end| end <= now_ms)
    }
}

page! {
    /// `GET /v1/previews`, `GET /v1/sandboxes/{sandbox}/previews`
    PreviewList {
        /// Oldest first.
        previews: Preview
    }
}

/// `POST /v1/sandboxes/{sandbox}/previews`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreatePreview {
    #[cfg_attr(feature = "openapi", schema(value_type = u16, minimum = 1))]
    pub port: NonZeroU16,
    /// Default: `port-` and the port.
    #[serde(default)]
    pub name: Option<Name>,
    #[serde(default)]
    pub public: bool,
    /// What its host names begin with. Default: something that nobody guesses.
    #[serde(default)]
    pub prefix: Option<PreviewLabel>,
    /// How long it lives.
    #[serde(default)]
    pub ttl_ms: Option<u64>,
    /// When it ends; instead of `ttl_ms`.
    #[serde(rename = "expires_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at_ms: Option<u64>,
    #[serde(default)]
    pub request_headers: BTreeMap<String, String>,
    #[serde(default)]
    pub response_headers: BTreeMap<String, String>,
    #[serde(default)]
    pub cors: Vec<String>,
    #[serde(default)]
    pub keep_open: bool,
}

impl CreatePreview {
    pub fn new(port: NonZeroU16) -> Self {
        Self {
            port,
            name: None,
            public: false,
            prefix: None,
            ttl_ms: None,
            expires_at_ms: None,
            request_headers: BTreeMap::new(),
            response_headers: BTreeMap::new(),
            cors: Vec::new(),
            keep_open: false,
        }
    }
}

/// `PATCH /v1/sandboxes/{sandbox}/previews/{preview}`. What is absent stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct UpdatePreview {
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u16>, minimum = 1))]
    pub port: Option<NonZeroU16>,
    pub public: Option<bool>,
    /// How long it lives from now on; null: as long as its sandbox.
    #[serde(deserialize_with = "time::given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub ttl_ms: Option<Option<u64>>,
    /// When it ends; instead of `ttl_ms`.
    #[serde(rename = "expires_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at_ms: Option<u64>,
    /// Instead of all there were, as are those below.
    pub request_headers: Option<BTreeMap<String, String>>,
    pub response_headers: Option<BTreeMap<String, String>>,
    pub cors: Option<Vec<String>>,
    pub keep_open: Option<bool>,
}

/// Opens a private preview.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PreviewToken {
    pub id: TokenId,
    /// Not valid from then on; absent: valid as long as the preview lives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "expires_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at_ms: Option<u64>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// Whether it is past its time.
    pub expired: bool,
    /// The text that opens: shown only when it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Where the preview is found with this token; shown only when it is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
}

page! {
    /// `GET /v1/sandboxes/{sandbox}/previews/{preview}/tokens`
    PreviewTokenList {
        /// Oldest first.
        tokens: PreviewToken
    }
}

/// `POST /v1/sandboxes/{sandbox}/previews/{preview}/tokens`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CreatePreviewToken {
    /// How long it is valid. Default: as long as the preview lives.
    pub ttl_ms: Option<u64>,
    /// When it ends; instead of `ttl_ms`.
    #[serde(rename = "expires_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at_ms: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_prefix_is_a_label_that_means_nothing_else() {
        for text in ["web", "my-app-2", "a", &"a".repeat(48), "p3000-web"] {
            assert!(text.parse::<PreviewLabel>().is_ok(), "{text}");
        }
        for text in [
            "",
            "3000-web",
            "Web",
            "a_b",
            "-a",
            "a-",
            "a.b",
            "www",
            "api",
            "torpor",
            "localhost",
            "xn--bcher-kva",
            "127",
            &"a".repeat(49),
        ] {
            assert!(text.parse::<PreviewLabel>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_random_label_is_read_as_it_is_written_and_differs_each_time() {
        let (one, other) = (PreviewLabel::random(), PreviewLabel::random());
        assert_eq!(one.as_str().len(), 26);
        assert_eq!(one.as_str().parse(), Ok(one.clone()));
        assert_ne!(one, other);
    }

    proptest! {
        #[test]
        fn no_label_is_taken_for_a_port_and_a_sandbox(text in "[a-z0-9-]{1,50}") {
            if let Ok(label) = text.parse::<PreviewLabel>() {
                let (first, rest) = label.as_str().split_once('-').unwrap_or(("x", ""));
                prop_assert!(first.parse::<u16>().is_err() || rest.is_empty());
            }
        }
    }
}
