//! Whom everybody inside trusts, beyond whom the image trusts: the one who reads some requests on
//! their way out.
//!
//! ```text
//!  certificate.rs   that it is one, and what OpenSSL calls it (digest.rs)
//!  bundle.rs        files with many, ours among them
//!  stores.rs        where programs look, and how ours gets there and away again
//!  java.rs          Java looks elsewhere, and only its own tool can write there
//! ```
//!
//! Invariants:
//! - It is there before the daemon hears so, but for Java's stores, which are late.
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
use stores::{AUTHORITIES, AUTHORITY, Stores};

/// What tells programs where to look that do not look at the system's places, and what they find
/// there. Node adds to its own; all others look nowhere else.
pub(crate) const VARIABLES: [(&str, &str); 9] = [
    ("SSL_CERT_FILE", AUTHORITIES),
    ("CURL_CA_BUNDLE", AUTHORITIES),
    ("REQUESTS_CA_BUNDLE", AUTHORITIES),
    ("PIP_CERT", AUTHORITIES),
    ("GIT_SSL_CAINFO", AUTHORITIES),
    ("AWS_CA_BUNDLE", AUTHORITIES),
    ("CARGO_HTTP_CAINFO", AUTHORITIES),
    ("DENO_CERT", AUTHORITIES),
    ("NODE_EXTRA_CA_CERTS", AUTHORITY),
];

/// That the identity's certificate is one.
pub(crate) fn check(identity: &Identity) -> Result<(), Failure> {
    let Some(text) = &identity.trust else { return Ok(()) };
    parsed(text).map(drop)
}

/// Makes everybody trust whom the identity says, and nobody trust whom an earlier one said.
pub(crate) fn assume(agent: &Rc<Agent>, identity: &Identity) -> Result<(), Failure> {
    let stores = Stores::new(Path::new("/"));
    let Some(text) = &identity.trust else {
        if let Some(complaints) = stores.remove() {
            say(agent, &complaints);
            java::forget(agent, &identity.env);
        }
        return Ok(());
    };
    let certificate = parsed(text)?;
    let complaints = stores.install(&certificate).map_err(|error| {
        // As far as it can be.
        let _ = stores.remove();
        cannot("cannot make everybody trust the certificate")(error)
    })?;
    say(agent, &complaints);
    java::learn(agent, &identity.env, &certificate);
    Ok(())
}

/// What could not be done is told among the lines of the processes that may miss it.
fn say(agent: &Agent, complaints: &[String]) {
    for complaint in complaints {
        agent.lines.note(complaint);
    }
}

fn parsed(text: &str) -> Result<Certificate, Failure> {
    let wrong =
        |why| failure(FailureCode::Invalid, format!("the certificate can't be used: {why}"));
    Certificate::parse(text).map_err(wrong)
}
