//! Why an image was not moved: one closed list. Whoever asked gives hints in their own words.

use std::time::Duration;

use crate::Digest;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image was not moved. Cloned for everybody who waits for the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{text:?} is no reference to an image: {why}")]
    BadReference { text: String, why: &'static str },
    /// What the operator said about registries makes no sense.
    #[error("registries: {0}")]
    Settings(String),
    /// Stored credentials can't be had.
    #[error("the credentials for {registry} can't be had: {why}")]
    Credentials { registry: String, why: String },
    #[error("the registry {registry} can't be reached: {why}")]
    Unreachable { registry: String, why: String },
    /// 401 and 403. `anonymous`: we had no credentials for it.
    #[error("the registry {registry} refuses {what}{}", shown(said))]
    Denied { registry: String, what: String, said: String, anonymous: bool },
    /// A user name with its password, or a token, that it does not know.
    #[error("the registry {registry} does not take this login{}", shown(said))]
    BadLogin { registry: String, said: String },
    #[error("the registry {registry} has no {what}")]
    NotFound { registry: String, what: String },
    #[error("the registry {registry} has had too many requests from here")]
    RateLimited { registry: String, retry_after: Option<Duration> },
    #[error("{reference} has no image for {wanted}, only for {has}")]
    NoPlatform { reference: String, wanted: String, has: String },
    /// Bytes that are not what they were said to be; nothing of them is kept.
    #[error("{what} from {registry} is not what it should be: {expected} became {found}")]
    Wrong { registry: String, what: String, expected: Digest, found: String },
    #[error("{what} has more than {limit} bytes")]
    TooLarge { what: String, limit: u64 },
    /// An artifact that is no root filesystem, or of a format of before 2016.
    #[error("{reference} can't be used: {why}")]
    Unsupported { reference: String, why: String },
    /// An answer that no registry gives.
    #[error("{registry} does not answer like a registry: {why}")]
    Garbled { registry: String, why: String },
    #[error("could not {action}: {why}")]
    Disk { action: &'static str, why: String, full: bool },
}

fn shown(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(": {said}") }
}

/// For `map_err` where a file is touched.
pub(crate) fn disk(action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |error| {
        let full = error.kind() == std::io::ErrorKind::StorageFull;
        Error::Disk { action, why: error.to_string(), full }
    }
}
