//! Ids and names: parsed once at the edge, believed inside.
//!
//! A sandbox has an id (21 lowercase alphanumerics, random) and may have a name (a DNS label that
//! starts with a letter). No text is both, so one path segment or host label finds either.

use std::fmt;
use std::str::FromStr;

/// Length of a sandbox id. 21 characters of 36 are 108 bits: unguessable, and a DNS label.
pub const SANDBOX_ID_LEN: usize = 21;
/// Longest name: a DNS label.
pub const NAME_MAX: usize = 63;

const ALPHABET: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// Why a text is not an id or a name; says what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {text:?} is not valid: {why}")]
pub struct BadName {
    what: &'static str,
    text: String,
    why: &'static str,
}

impl BadName {
    pub(crate) fn new(what: &'static str, text: &str, why: &'static str) -> Self {
        // Whoever sends a megabyte as a name need not get it back.
        let text = text.chars().take(80).collect();
        Self { what, text, why }
    }
}

/// A text that is what it says, because there is no way to make one but `FromStr`.
macro_rules! text_type {
    ($type:ident, $doc:literal) => {
        #[doc = $doc]
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(transparent)]
        pub struct $type(String);

        impl $type {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        $crate::id::parsed_from_text!($type);
    };
}
pub(crate) use text_type;

/// Deserialized by `FromStr`.
macro_rules! parsed_from_text {
    ($type:ident $(<$id:ident>)?) => {
        impl<'de $(, $id: std::str::FromStr)?> serde::Deserialize<'de> for $type $(<$id>)? {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                <String as serde::Deserialize>::deserialize(d)?
                    .parse()
                    .map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use parsed_from_text;

/// An id that is made at random: 21 characters behind what tells it from other ids.
macro_rules! random_id {
    ($type:ident, $prefix:literal, $what:literal, $why:literal) => {
        impl $type {
            /// A fresh random id.
            pub fn random() -> Self {
                Self(format!(concat!($prefix, "{}"), random_text()))
            }
        }

        impl FromStr for $type {
            type Err = BadName;
            fn from_str(text: &str) -> Result<Self, BadName> {
                if text.strip_prefix($prefix).is_some_and(looks_like_id) {
                    return Ok(Self(text.to_owned()));
                }
                Err(BadName::new($what, text, $why))
            }
        }
    };
}

text_type!(SandboxId, "A sandbox, for ever: 21 lowercase alphanumerics.");
text_type!(
    Name,
    "What a person calls a sandbox: a DNS label that starts with a letter and is no id."
);
text_type!(ImageId, "An image: the BLAKE3 hash of its tree, 64 hexadecimal digits.");
text_type!(SnapshotId, "A snapshot, for ever: `snap-` and 21 lowercase alphanumerics.");
text_type!(SecretName, "What a secret is called, and the variable that carries it.");
text_type!(BuildId, "A build of an image: `build-` and 21 lowercase alphanumerics.");
text_type!(ExecutionId, "An execution of a job: `exec-` and 21 lowercase alphanumerics.");
text_type!(SaveId, "A saved moment of a machine, in the store: 21 lowercase alphanumerics.");
text_type!(PreviewId, "A preview, for ever: `preview-` and 21 lowercase alphanumerics.");
text_type!(NodeId, "A host of an installation, for ever: `node-` and 21 lowercase alphanumerics.");
text_type!(VolumeId, "A volume or a drive, for ever: `vol-` and 21 lowercase alphanumerics.");
text_type!(EventId, "An event, for ever: `event-` and 21 lowercase alphanumerics.");
text_type!(WebhookId, "A webhook, for ever: `webhook-` and 21 lowercase alphanumerics.");
text_type!(DeliveryId, "A delivery: `delivery-` and 21 lowercase alphanumerics.");
text_type!(ServiceId, "A service, for ever: `svc-` and 21 lowercase alphanumerics.");
text_type!(ScheduleId, "A schedule, for ever: `schedule-` and 21 lowercase alphanumerics.");
text_type!(FiringId, "A time that a schedule fired: `firing-` and 21 lowercase alphanumerics.");
text_type!(InvocationId, "An invocation of a service: `inv-` and 21 lowercase alphanumerics.");
text_type!(TokenId, "A token of a preview, not its text: `token-` and 21 lowercase alphanumerics.");

random_id!(SandboxId, "", "sandbox id", "an id is 21 lowercase letters and digits");
random_id!(SaveId, "", "save id", "an id is 21 lowercase letters and digits");
random_id!(
    SnapshotId,
    "snap-",
    "snapshot id",
    "a snapshot's id is snap- and 21 lowercase letters and digits"
);
random_id!(
    BuildId,
    "build-",
    "build id",
    "a build's id is build- and 21 lowercase letters and digits"
);
random_id!(
    PreviewId,
    "preview-",
    "preview id",
    "a preview's id is preview- and 21 lowercase letters and digits"
);
random_id!(
    TokenId,
    "token-",
    "token id",
    "a token's id is token- and 21 lowercase letters and digits"
);
random_id!(
    VolumeId,
    "vol-",
    "volume id",
    "a volume's id is vol- and 21 lowercase letters and digits"
);
random_id!(
    EventId,
    "event-",
    "event id",
    "an event's id is event- and 21 lowercase letters and digits"
);
random_id!(
    WebhookId,
    "webhook-",
    "webhook id",
    "a webhook's id is webhook- and 21 lowercase letters and digits"
);
random_id!(
    DeliveryId,
    "delivery-",
    "delivery id",
    "a delivery's id is delivery- and 21 lowercase letters and digits"
);
random_id!(
    ExecutionId,
    "exec-",
    "execution id",
    "an execution's id is exec- and 21 lowercase letters and digits"
);
random_id!(
    InvocationId,
    "inv-",
    "invocation id",
    "an invocation's id is inv- and 21 lowercase letters and digits"
);
random_id!(
    ServiceId,
    "svc-",
    "service id",
    "a service's id is svc- and 21 lowercase letters and digits"
);
random_id!(
    ScheduleId,
    "schedule-",
    "schedule id",
    "a schedule's id is schedule- and 21 lowercase letters and digits"
);
random_id!(
    FiringId,
    "firing-",
    "firing id",
    "a firing's id is firing- and 21 lowercase letters and digits"
);
random_id!(NodeId, "node-", "node id", "a node's id is node- and 21 lowercase letters and digits");

/// Longest name of a secret.
pub const SECRET_NAME_MAX: usize = 128;

impl SnapshotId {
    /// Always the same of the same seed, which is random itself.
    pub fn of_seed(seed: &[u8]) -> Self {
        Self(format!("snap-{}", seeded_text(seed)))
    }
}

impl ExecutionId {
    /// Always the same of the same seed, which is random itself.
    pub fn of_seed(seed: &[u8]) -> Self {
        Self(format!("exec-{}", seeded_text(seed)))
    }
}

fn seeded_text(seed: &[u8]) -> String {
    let digit = |n: usize| seed.get(n % seed.len().max(1)).map_or(0, |byte| usize::from(byte % 36));
    (0..SANDBOX_ID_LEN).map(|n| char::from(ALPHABET[digit(n)])).collect()
}

impl FromStr for SecretName {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let first = text.as_bytes().first();
        if text.len() <= SECRET_NAME_MAX
            && text.bytes().all(word)
            && first.is_some_and(|b| !b.is_ascii_digit())
        {
            return Ok(Self(text.to_owned()));
        }
        let why =
            "it is the name of a variable: A-Z, a-z, 0-9 and '_', no digit first, at most 128";
        Err(BadName::new("secret name", text, why))
    }
}

fn random_text() -> String {
    let mut text = String::with_capacity(SANDBOX_ID_LEN);
    while text.len() < SANDBOX_ID_LEN {
        let mut bytes = [0u8; 32];
        getrandom::fill(&mut bytes).expect("the system has entropy");
        // 252 is the largest multiple of 36 in a byte: above it the remainder would be biased.
        let fair = bytes.iter().filter(|byte| **byte < 252);
        text.extend(fair.map(|byte| char::from(ALPHABET[usize::from(byte % 36)])));
    }
    text.truncate(SANDBOX_ID_LEN);
    text
}

fn looks_like_id(text: &str) -> bool {
    text.len() == SANDBOX_ID_LEN
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

impl FromStr for Name {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = |why| Err(BadName::new("name", text, why));
        if text.is_empty() || text.len() > NAME_MAX {
            return bad("a name has 1 to 63 characters");
        }
        if !text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
            return bad("a name consists of a-z, 0-9 and '-'");
        }
        if !text.starts_with(|c: char| c.is_ascii_lowercase()) || text.ends_with('-') {
            return bad("a name starts with a letter and does not end with '-'");
        }
        if looks_like_id(text)
            || text.parse::<SnapshotId>().is_ok()
            || text.parse::<VolumeId>().is_ok()
            || text.parse::<ExecutionId>().is_ok()
            || text.parse::<ScheduleId>().is_ok()
        {
            return bad("it could be mistaken for an id: make it longer or shorter, or add a '-'");
        }
        Ok(Self(text.to_owned()))
    }
}

impl FromStr for ImageId {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.len() == 64 && text.bytes().all(hex) {
            return Ok(Self(text.to_owned()));
        }
        Err(BadName::new("image id", text, "an image id is 64 hexadecimal digits"))
    }
}

/// How a request names something: by id or by name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Ref<Id> {
    Id(Id),
    Name(Name),
}

pub type SandboxRef = Ref<SandboxId>;
pub type SnapshotRef = Ref<SnapshotId>;
/// A job by its name, or an execution by its id.
pub type JobRef = Ref<ExecutionId>;
pub type ScheduleRef = Ref<ScheduleId>;

impl<Id: FromStr> FromStr for Ref<Id> {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        text.parse().map(Self::Id).or_else(|_| text.parse().map(Self::Name))
    }
}

impl<Id: fmt::Display> fmt::Display for Ref<Id> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

parsed_from_text!(Ref<Id>);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_random_id_is_an_id_and_no_name() {
        for _ in 0..200 {
            let id = SandboxId::random().to_string();
            assert!(id.parse::<SandboxId>().is_ok(), "{id}");
            assert!(id.parse::<Name>().is_err(), "{id}");
        }
    }

    #[test]
    fn hostile_names_are_refused() {
        let long = "a".repeat(64);
        let bad = [
            "",
            "-a",
            "a-",
            "1web",
            "Web",
            "we_b",
            "../etc",
            "a/b",
            "a\0b",
            "a\nb",
            "ä",
            &long,
            "a.b",
            "abcdefghijklmnopqrstu",
        ];
        for text in bad {
            assert!(text.parse::<Name>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn an_error_does_not_echo_a_megabyte() {
        let error = "A".repeat(1 << 20).parse::<Name>().unwrap_err().to_string();
        assert!(error.len() < 300, "{}", error.len());
    }

    proptest! {
        #[test]
        fn a_reference_is_never_both_id_and_name(text in "[a-z0-9-]{1,70}") {
            prop_assert!(text.parse::<SandboxId>().is_err() || text.parse::<Name>().is_err());
        }
    }
}
