//! Domains of one's own: host names elsewhere in the world that lead to a preview, once it is shown
//! that whoever added one decides about it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::hosting::MAIN_PREVIEW;
use crate::id::{BadName, Name, PreviewId, SandboxRef, parsed_from_text, text_type};
use crate::page::page;
use crate::time;

/// What stands before a domain in the name of the record that proves it.
pub const PROOF_LABEL: &str = "_torpor";
/// How the text of that record begins.
pub const PROOF_PREFIX: &str = "torpor-verify=";

/// Longest host name, less [`PROOF_LABEL`] and its dot.
const DOMAIN_MAX: usize = 253 - PROOF_LABEL.len() - 1;
const LABEL_MAX: usize = 63;

text_type!(
    DomainName,
    "A host name such as `app.example.org`, or `*.example.org`: every name that has one label more."
);

impl DomainName {
    pub fn is_wildcard(&self) -> bool {
        self.0.starts_with("*.")
    }

    /// The name without its star.
    pub fn base(&self) -> &str {
        self.0.strip_prefix("*.").unwrap_or(&self.0)
    }

    /// The name of the record that proves it.
    pub fn proof_name(&self) -> String {
        format!("{PROOF_LABEL}.{}", self.base())
    }

    /// Whether a host, in small letters, is meant.
    pub fn covers(&self, host: &str) -> bool {
        if !self.is_wildcard() {
            return self.0 == host;
        }
        host.split_once('.').is_some_and(|(label, rest)| !label.is_empty() && rest == self.base())
    }
}

impl FromStr for DomainName {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = |why| Err(BadName::new("domain", text, why));
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let base = name.strip_prefix("*.").unwrap_or(&name);
        if name.len() > DOMAIN_MAX {
            return bad("it is too long");
        }
        let labels: Vec<&str> = base.split('.').collect();
        if labels.len() < 2 {
            return bad("it is a whole name, such as app.example.org or *.example.org");
        }
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let label_is_fine = |label: &&str| {
            (1..=LABEL_MAX).contains(&label.len())
                && label.bytes().all(plain)
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if !labels.iter().all(label_is_fine) {
            return bad("its parts consist of a-z, 0-9 and '-'; other scripts are written xn--…");
        }
        let last = labels.last().copied().unwrap_or_default();
        if last.bytes().all(|b| b.is_ascii_digit()) {
            return bad("it is an address: a name is needed");
        }
        if last == "localhost" {
            return bad("names below localhost lead everybody to their own computer");
        }
        Ok(Self(name))
    }
}

/// How far a domain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DomainState {
    /// Nobody has shown yet that it is theirs.
    Pending,
    /// It leads to its preview.
    Verified,
    /// The proof has been missing for too long: it leads nowhere.
    Failed,
}

impl DomainState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Verified => "verified",
            Self::Failed => "failed",
        }
    }
}

impl FromStr for DomainState {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        [Self::Pending, Self::Verified, Self::Failed]
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| BadName::new("state of a domain", text, "there is no such state"))
    }
}

/// A record to set at whoever serves the names of the domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DomainRecord {
    /// `TXT` or `CNAME`. Where a CNAME can't stand, an A or AAAA record with the address of the same
    /// host does as well.
    #[serde(rename = "type")]
    pub kind: String,
    pub name: String,
    pub value: String,
    /// What it is for.
    pub purpose: String,
}

/// A host name that leads to a preview.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Domain {
    pub name: DomainName,
    pub preview: PreviewId,
    /// The preview as people call it, `SANDBOX/PREVIEW`; absent if it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub target: Option<PreviewPath>,
    pub state: DomainState,
    /// What to set, the proof first.
    pub records: Vec<DomainRecord>,
    /// What the last look found, unless it was the proof.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The last look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "checked_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub checked_at_ms: Option<u64>,
    /// When the proof was last seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "proven_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub proven_at_ms: Option<u64>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
}

page! {
    /// `GET /v1/domains`
    DomainList {
        /// Sorted by name.
        domains: Domain
    }
}

/// `POST /v1/domains`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddDomain {
    pub name: DomainName,
    /// `SANDBOX/PREVIEW`, by name or id, or `service:NAME`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub preview: PreviewPath,
}

/// How a request names a preview: `SANDBOX/PREVIEW`, such as `web/port-3000`, or `service:NAME`, or
/// `service:NAME/TAG`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PreviewPath {
    pub of: PreviewOwner,
    pub preview: Name,
}

/// Whose preview it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PreviewOwner {
    Sandbox(SandboxRef),
    Service(Name),
}

/// What a service's name is written behind.
const SERVICE: &str = "service:";

impl fmt::Display for PreviewPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.of {
            PreviewOwner::Sandbox(sandbox) => write!(f, "{sandbox}/{}", self.preview),
            PreviewOwner::Service(name) if self.preview.as_str() == MAIN_PREVIEW => {
                write!(f, "{SERVICE}{name}")
            }
            PreviewOwner::Service(name) => write!(f, "{SERVICE}{name}/{}", self.preview),
        }
    }
}

impl FromStr for PreviewPath {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        if let Some(service) = text.strip_prefix(SERVICE) {
            let (name, tag) = service.split_once('/').unwrap_or((service, MAIN_PREVIEW));
            return Ok(Self { of: PreviewOwner::Service(name.parse()?), preview: tag.parse()? });
        }
        let why = "it is written SANDBOX/PREVIEW, such as web/port-3000, or service:NAME";
        let (sandbox, preview) =
            text.split_once('/').ok_or_else(|| BadName::new("preview", text, why))?;
        Ok(Self { of: PreviewOwner::Sandbox(sandbox.parse()?), preview: preview.parse()? })
    }
}

impl Serialize for PreviewPath {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

parsed_from_text!(PreviewPath);

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(text: &str) -> DomainName {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_star_stands_for_exactly_one_label() {
        let star = domain("*.Example.org.");
        assert_eq!(star.as_str(), "*.example.org");
        assert!(star.covers("a.example.org"));
        for host in ["example.org", "a.b.example.org", ".example.org", "aexample.org", ""] {
            assert!(!star.covers(host), "{host}");
        }
        let plain = domain("app.example.org");
        assert!(plain.covers("app.example.org") && !plain.covers("x.app.example.org"));
    }

    #[test]
    fn the_proof_of_a_wildcard_stands_where_a_record_can_stand() {
        assert_eq!(domain("*.example.org").proof_name(), "_torpor.example.org");
        assert_eq!(domain("app.example.org").proof_name(), "_torpor.app.example.org");
    }

    #[test]
    fn hostile_domains_are_refused() {
        let long = format!("{}.org", "a.".repeat(140));
        let label = format!("{}.org", "a".repeat(64));
        let bad = [
            "",
            ".",
            "*",
            "*.",
            "org",
            "*.org",
            "*.*.example.org",
            "a.*.example.org",
            "a..org",
            "-a.org",
            "a-.org",
            "a_b.org",
            "a b.org",
            "a/b.org",
            "ä.org",
            "127.0.0.1",
            "1.2",
            "a.localhost",
            &long,
            &label,
        ];
        for text in bad {
            assert!(text.parse::<DomainName>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn a_preview_is_named_by_its_sandbox_and_its_name() {
        let path: PreviewPath = "web/port-3000".parse().unwrap();
        assert_eq!(path.to_string(), "web/port-3000");
        for (text, preview) in [("service:shop", "main"), ("service:shop/next", "next")] {
            let path: PreviewPath = text.parse().unwrap();
            assert_eq!((path.to_string().as_str(), path.preview.as_str()), (text, preview));
        }
        for text in ["web", "web/", "/x", "a/b/c", "../x", "service:", "service:a/b/c"] {
            assert!(text.parse::<PreviewPath>().is_err(), "{text:?} was accepted");
        }
    }
}
