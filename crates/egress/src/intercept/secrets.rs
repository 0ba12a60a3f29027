//! Secret injection: the secrets of a policy for one target: which may go into a request, which could come back,
//! and what was used.
//!
//! Invariants
//! - A secret goes where one of its bindings says: to that host, on that port, with TLS unless the binding
//!   says otherwise. One that is bound to nothing goes where routes say, with TLS on port 443.
//! - What could come back from a host is every secret of the policy that is bound to it or that a route
//!   for it names, whatever this very request got: a server may have kept it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use torpor_lifecycle::store::{BoundSecret, Vault};
use torpor_protocol::{Network, Route, SecretName};

use super::body::CHANGED_MAX;
use super::forms::Form;
use super::placeholder::{self, Script};
use super::redact::Needles;
use super::refusal::Refusal;

/// Where a request goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) host: &'a str,
    pub(super) port: u16,
    pub(super) tls: bool,
}

/// Where secrets go that are bound to nothing.
const USUAL: (u16, bool) = (443, true);

impl Target<'_> {
    fn permits(&self, secret: &BoundSecret) -> bool {
        let Self { host, port, tls } = *self;
        let bound = secret.hosts.iter().any(|binding| binding.permits(host, port, tls));
        bound || (secret.hosts.is_empty() && (port, tls) == USUAL)
    }

    /// Why this secret is not sent to this target, though it may be sent to this host.
    fn barred(&self, name: &SecretName, secret: &BoundSecret) -> Refusal {
        let here = secret.hosts.iter().filter(|binding| binding.host().matches(self.host));
        let mut bound: Vec<_> = here.map(ToString::to_string).collect();
        if bound.is_empty() {
            bound.push(self.host.to_owned());
        }
        let bound = bound.join(" and ");
        Refusal::Barred { name: name.clone(), target: self.to_string(), bound }
    }
}

/// As bindings are written, but always with the scheme.
impl fmt::Display for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, usual) = if self.tls { ("https", 443) } else { ("http", 80) };
        write!(f, "{scheme}://{}", self.host)?;
        if self.port == usual { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

/// The secrets that a policy names: in routes, and for the code.
pub(crate) fn secrets_of(network: &Network) -> BTreeSet<SecretName> {
    let routed = network.routes.iter().flat_map(named_by);
    routed.chain(network.secrets.iter().cloned()).collect()
}

fn named_by(route: &Route) -> Vec<SecretName> {
    let all = route.headers.values().chain(route.query.values()).chain(route.body.values());
    all.flat_map(|template| placeholder::names(template.as_bytes())).collect()
}

/// A value that may stand for a placeholder.
pub(super) struct Value {
    text: String,
    /// It may not: why.
    barred: Option<Refusal>,
}

impl Value {
    pub(super) fn text(&self) -> &str {
        &self.text
    }
}

pub(super) type Values = BTreeMap<SecretName, Value>;

/// All secrets of a policy that are there.
pub(super) struct PolicySecrets(BTreeMap<SecretName, BoundSecret>);

impl PolicySecrets {
    pub(super) async fn open(vault: &dyn Vault, network: &Network) -> Result<Self, Refusal> {
        let mut secrets = BTreeMap::new();
        for name in secrets_of(network) {
            let secret = vault.bound(&name).await.map_err(|error| {
                tracing::warn!(%name, %error, "cannot read secret, request refused");
                Refusal::Vault(name.clone())
            })?;
            secrets.extend(secret.map(|secret| (name, secret)));
        }
        Ok(Self(secrets))
    }

    /// The secrets that these routes need.
    pub(super) fn of_routes(
        &self,
        routes: &[&Route],
        target: Target<'_>,
    ) -> Result<Values, Refusal> {
        let mut values = Values::new();
        for name in routes.iter().flat_map(|route| named_by(route)) {
            let secret = self.0.get(&name).ok_or_else(|| Refusal::NoSecret(name.clone()))?;
            if !secret.hosts.is_empty() && !secret.is_bound_to(target.host) {
                return Err(Refusal::NotBound { name, host: target.host.to_owned() });
            }
            if !target.permits(secret) {
                return Err(target.barred(&name, secret));
            }
            values.insert(name, Value { text: secret.value.clone(), barred: None });
        }
        Ok(values)
    }

    /// The secrets that the code in the sandbox may use for this host.
    pub(super) fn of_the_code(&self, names: &[SecretName], target: Target<'_>) -> Values {
        let here = names.iter().filter_map(|name| {
            let secret = self.0.get(name).filter(|secret| secret.is_bound_to(target.host))?;
            let barred = (!target.permits(secret)).then(|| target.barred(name, secret));
            Some((name.clone(), Value { text: secret.value.clone(), barred }))
        });
        here.collect()
    }

    /// What must not come back from this host; `before` if it is the same.
    pub(super) fn needles(&self, network: &Network, host: &str, before: &Needles) -> Needles {
        let here = |route: &&Route| route.hosts.iter().any(|one| one.matches(host));
        let routed: BTreeSet<_> = network.routes.iter().filter(here).flat_map(named_by).collect();
        let concerns = |(name, secret): &(&SecretName, &BoundSecret)| {
            secret.is_bound_to(host) || (secret.hosts.is_empty() && routed.contains(*name))
        };
        let secrets = self.0.iter().filter(concerns).map(|(name, secret)| (name, &*secret.value));
        let secrets: Vec<_> = secrets.collect();
        if before.are_of(&secrets) { before.clone() } else { Needles::of(&secrets) }
    }
}

/// What was put into a request.
pub(super) struct Used {
    pub(super) names: BTreeSet<SecretName>,
    /// Bytes that may still be put in: a body full of placeholders would grow without end.
    left: usize,
}

impl Default for Used {
    fn default() -> Self {
        Self { names: BTreeSet::new(), left: CHANGED_MAX }
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
            let Some(Value { text, barred }) = values.get(name) else { return Ok(None) };
            if let Some(why) = barred {
                return Err(why.clone());
            }
            let written = form.write(text);
            self.left = self.left.checked_sub(written.len()).ok_or(Refusal::Swollen)?;
            self.names.insert(name.clone());
            Ok(Some(written))
        })
    }

    /// The value of a route with all secrets in it, as it is.
    pub(super) fn fill(&mut self, template: &str, values: &Values) -> Result<String, Refusal> {
        let filled = self.replace(template.as_bytes(), Script::Plain, values, Form::Raw)?;
        let filled = filled.unwrap_or_else(|| template.as_bytes().to_vec());
        Ok(String::from_utf8(filled).expect("texts in place of parts of a text are a text"))
    }
}
