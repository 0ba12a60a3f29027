//! Secrets on their way into one request: their values, and what was used of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use torpor_lifecycle::store::{BoundSecret, StoreError, Vault};
use torpor_protocol::SecretName;

use super::body::CHANGED_MAX;
use super::placeholder::{self, Script};
use super::redact::Needles;
use super::refusal::Refusal;

/// How a value is written where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// As it is.
    Raw,
    /// As a part of a path.
    Path,
    /// As a part of a query or a form.
    Query,
    /// Inside a string of JSON.
    Json,
}

impl Form {
    const ALL: [Self; 4] = [Self::Raw, Self::Path, Self::Query, Self::Json];

    pub(super) fn write(self, value: &str) -> Vec<u8> {
        match self {
            Self::Raw => value.as_bytes().to_vec(),
            Self::Path => percent(value, b"-._~:@!$&'()*,;="),
            Self::Query => percent(value, b"-._~"),
            Self::Json => {
                let quoted = serde_json::Value::from(value).to_string();
                quoted.as_bytes()[1..quoted.len() - 1].to_vec()
            }
        }
    }
}

/// With percent signs for all but letters, digits and these.
fn percent(value: &str, kept: &[u8]) -> Vec<u8> {
    let mut written = Vec::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || kept.contains(&byte) {
            written.push(byte);
        } else {
            written.extend_from_slice(format!("%{byte:02X}").as_bytes());
        }
    }
    written
}

/// Some secrets that may be used now.
pub(super) type Values = BTreeMap<SecretName, BoundSecret>;

/// The secrets that the code in the sandbox may use for this host.
pub(super) async fn of_the_code(
    vault: &dyn Vault,
    names: &[SecretName],
    host: &str,
) -> Result<Values, Refusal> {
    let mut values = Values::new();
    for name in names {
        let secret = vault.bound(name).await.map_err(|error| unavailable(name, &error))?;
        let here = |secret: &BoundSecret| secret.hosts.iter().any(|one| one.matches(host));
        values.extend(secret.filter(here).map(|secret| (name.clone(), secret)));
    }
    Ok(values)
}

/// The secrets that routes need for this host.
pub(super) async fn of_routes(
    vault: &dyn Vault,
    names: BTreeSet<SecretName>,
    host: &str,
) -> Result<Values, Refusal> {
    let mut values = Values::new();
    for name in names {
        let secret = vault.bound(&name).await.map_err(|error| unavailable(&name, &error))?;
        let secret = secret.ok_or_else(|| Refusal::NoSecret(name.clone()))?;
        let here = secret.hosts.iter().any(|one| one.matches(host));
        if !secret.hosts.is_empty() && !here {
            return Err(Refusal::NotBound { name, host: host.to_owned() });
        }
        values.insert(name, secret);
    }
    Ok(values)
}

fn unavailable(name: &SecretName, error: &StoreError) -> Refusal {
    tracing::warn!(%name, %error, "a secret can't be read");
    Refusal::Vault(name.clone())
}

/// What was put into a request.
pub(super) struct Used {
    pub(super) names: BTreeSet<SecretName>,
    /// What must not come back with the answer.
    pub(super) needles: Needles,
    /// Bytes that may still be put in: a body full of placeholders would grow without end.
    left: usize,
}

/// Shows nothing of the values.
impl fmt::Debug for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Used").field("names", &self.names).finish_non_exhaustive()
    }
}

impl Default for Used {
    fn default() -> Self {
        Self { names: BTreeSet::new(), needles: Needles::default(), left: CHANGED_MAX }
    }
}

impl Used {
    /// The text with values in place of its placeholders; none if none of them is one of `values`.
    pub(super) fn replace(
        &mut self,
        text: &[u8],
        script: Script,
        values: &Values,
        form: Form,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        placeholder::replace(text, script, |name| {
            let Some(secret) = values.get(name) else { return Ok(None) };
            let written = form.write(&secret.value);
            self.left = self.left.checked_sub(written.len()).ok_or(Refusal::Swollen)?;
            self.note(name, &secret.value);
            Ok(Some(written))
        })
    }

    /// The value of a route with all secrets in it, as it is.
    pub(super) fn fill(&mut self, template: &str, values: &Values) -> Result<String, Refusal> {
        let filled = self.replace(template.as_bytes(), Script::Plain, values, Form::Raw)?;
        let filled = filled.unwrap_or_else(|| template.as_bytes().to_vec());
        Ok(String::from_utf8(filled).expect("texts in place of parts of a text are a text"))
    }

    fn note(&mut self, name: &SecretName, value: &str) {
        if self.names.insert(name.clone()) {
            for form in Form::ALL {
                self.needles.add(&form.write(value), name);
            }
        }
    }
}
