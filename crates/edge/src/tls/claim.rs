//! Which certificate a host gets, if it is ours. Whoever connects chooses the name, so this is what
//! stands between strangers and the patience of a directory.

use std::sync::Arc;

use torpor_protocol::PreviewId;
use torpor_service::domains::Domains;

/// Which previews there are.
pub(crate) struct Existing {
    pub(crate) by_label: Box<dyn Fn(&str) -> bool + Send + Sync>,
    pub(crate) by_id: Box<dyn Fn(&PreviewId) -> bool + Send + Sync>,
}

/// The names that are ours.
pub(super) struct Claims {
    /// Of the daemon itself.
    pub(super) names: Vec<String>,
    /// All names below it lead here; empty: there is no such name that anybody gives certificates for.
    pub(super) previews: String,
    /// Whether one certificate can be had for all names below a domain.
    pub(super) wildcards: bool,
    pub(super) existing: Existing,
    pub(super) domains: Arc<Domains>,
}

impl Claims {
    /// The name of the certificate for a host in small letters; none if it is not ours.
    pub(super) fn certificate(&self, host: &str) -> Option<String> {
        if self.names.iter().any(|name| name == host) {
            return Some(host.to_owned());
        }
        if !self.previews.is_empty() {
            if host == self.previews {
                return Some(host.to_owned());
            }
            if let Some(label) = label_below(host, &self.previews) {
                if self.wildcards {
                    return Some(format!("*.{}", self.previews));
                }
                return (self.existing.by_label)(label).then(|| host.to_owned());
            }
        }
        let (domain, preview) = self.domains.verified_name(host)?;
        if !(self.existing.by_id)(&preview) {
            return None;
        }
        // Without wildcards there would be a certificate for each name that a stranger thinks of.
        (!domain.is_wildcard() || self.wildcards).then(|| domain.as_str().to_owned())
    }

    /// Certificates that are sure to be needed.
    pub(super) fn always(&self) -> Vec<String> {
        let mut names = self.names.clone();
        if self.wildcards {
            if !self.previews.is_empty() {
                names.push(format!("*.{}", self.previews));
            }
            let domains = self.domains.verified_wildcards();
            names.extend(domains.iter().map(ToString::to_string));
        }
        names
    }

    /// Whether a certificate of that name is still of use.
    pub(super) fn wants(&self, certificate: &str) -> bool {
        match certificate.strip_prefix("*.") {
            // Any label will do.
            Some(base) => self.certificate(&format!("x.{base}")).as_deref() == Some(certificate),
            None => self.certificate(certificate).as_deref() == Some(certificate),
        }
    }
}

/// The one label that a host has more than a domain.
fn label_below<'a>(host: &'a str, domain: &str) -> Option<&'a str> {
    let label = host.strip_suffix(domain)?.strip_suffix('.')?;
    (!label.is_empty() && !label.contains('.')).then_some(label)
}

#[cfg(test)]
mod tests;
