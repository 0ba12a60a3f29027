//! CA certificates that everybody inside trusts, beyond those of the image: the one of interception, and
//! those of the operator.
//!
//! ```text
//!  certificate.rs   that each is one, and what OpenSSL calls it (digest.rs)
//!  bundle.rs        files with many, ours among them
//!  stores.rs        where programs look, and how ours gets there and away again
//!  java.rs          Java looks elsewhere, and only its own tool can write there
//! ```
//!
//! Invariants:
//! - They are there before the daemon hears so, but for Java's stores, which are late.
//! - Done twice is done once; not wanted and never there costs one look.

mod bundle;
mod certificate;
mod digest;
mod java;
#[cfg(test)]
mod samples;
mod stores;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::rc::Rc;

use torpor_protocol::guest::{Failure, FailureCode, Identity};

use crate::agent::Agent;
use crate::failure::{cannot, failure};
use certificate::Certificate;
use stores::{CA_BUNDLE, OUR_CA, Stores};

/// What tells programs where to look that do not look at the system's places, and what they find
/// there. Node adds to its own; all others look nowhere else.
pub(crate) const VARIABLES: [(&str, &str); 9] = [
    ("SSL_CERT_FILE", CA_BUNDLE),
    ("CURL_CA_BUNDLE", CA_BUNDLE),
    ("REQUESTS_CA_BUNDLE", CA_BUNDLE),
    ("PIP_CERT", CA_BUNDLE),
    ("GIT_SSL_CAINFO", CA_BUNDLE),
    ("AWS_CA_BUNDLE", CA_BUNDLE),
    ("CARGO_HTTP_CAINFO", CA_BUNDLE),
    ("DENO_CERT", CA_BUNDLE),
    ("NODE_EXTRA_CA_CERTS", OUR_CA),
];

/// That the identity's certificates are some.
pub(crate) fn check(identity: &Identity) -> Result<(), Failure> {
    certificates(identity).map(drop)
}

/// Makes everybody trust what the identity says, and nobody trust what an earlier one said.
pub(crate) fn assume(agent: &Rc<Agent>, identity: &Identity) -> Result<(), Failure> {
    let stores = Stores::new(Path::new("/"));
    let certificates = certificates(identity)?;
    if certificates.is_empty() {
        if let Some(complaints) = stores.remove() {
            say(agent, &complaints);
            java::forget(agent, &identity.env);
        }
        return Ok(());
    }
    let complaints = stores.install(&certificates).map_err(|error| {
        // As far as it can be.
        let _ = stores.remove();
        cannot("cannot make everybody trust the CA certificates")(error)
    })?;
    say(agent, &complaints);
    java::learn(agent, &identity.env, certificates);
    Ok(())
}

/// What could not be done is told among the lines of the processes that may miss it.
fn say(agent: &Agent, complaints: &[String]) {
    for complaint in complaints {
        agent.lines.note(complaint);
    }
}

/// Each once.
fn certificates(identity: &Identity) -> Result<Vec<Certificate>, Failure> {
    let wrong =
        |why| failure(FailureCode::Invalid, format!("a CA certificate can't be used: {why}"));
    let mut certificates = Vec::new();
    for text in identity.ca.iter().chain(&identity.extra_ca) {
        let certificate = Certificate::parse(text).map_err(wrong)?;
        if !certificates.contains(&certificate) {
            certificates.push(certificate);
        }
    }
    Ok(certificates)
}
