//! `torpor domain`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;
use torpor_client::{Client, Route};
use torpor_protocol::ErrorCode;
use torpor_protocol::domain::{
    AddDomain, Domain as Kept, DomainList, DomainName, DomainState, PreviewPath,
};

use super::removal::remove;
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::units;

/// Manage custom domains.
///
/// A domain leads to its preview once a TXT record shows that it is yours; `add` prints the records to
/// set, `verify` looks for them. The proof is looked at again every day. With tls.acme_directory the
/// daemon gets a certificate for it by itself.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor domain add app.example.org --preview web/port-3000\n  \
    torpor domain verify app.example.org\n  torpor domain ls"
)]
pub(super) struct Domain {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Add a domain, and print the records that it needs.
    Add {
        /// Such as app.example.org, or '*.example.org' for all names with one label more.
        domain: DomainName,
        /// Where it shall lead.
        #[arg(long, value_name = "SANDBOX/PREVIEW|service:NAME")]
        preview: PreviewPath,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List domains.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Verify the DNS records of a domain now; fails if they are not there yet.
    Verify {
        domain: DomainName,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove domains. They lead nowhere any more.
    Rm {
        #[arg(required = true, value_name = "DOMAIN")]
        domains: Vec<DomainName>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
}

fn route() -> Route {
    Route::new("/v1/domains")
}

impl Domain {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Add { domain, preview, json } => add(client, domain, preview, json).await?,
            Action::Ls { json } => {
                let list: DomainList = client.list(&route()).await?;
                output::show(json, &list, || table(&list.domains, units::now_ms()))?;
            }
            Action::Verify { domain, json } => verify(client, &domain, json).await?,
            Action::Rm { domains, force } => {
                let route = |name: &DomainName| route().part(name.as_str());
                remove(client, &domains, route, force, ErrorCode::NotFound).await?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn add(client: &Client, name: DomainName, preview: PreviewPath, json: bool) -> Result<()> {
    let added: Kept = client.post(&route(), &AddDomain { name, preview }).await?;
    if json {
        return output::json(&added);
    }
    output::print(&records(&added))?;
    output::note(&format!("set these records, then: torpor domain verify {}", quoted(&added.name)));
    Ok(())
}

async fn verify(client: &Client, name: &DomainName, json: bool) -> Result<()> {
    let route = route().part(name.as_str()).then("/verify");
    let found: Kept = client.post(&route, &json!({})).await?;
    if json {
        output::json(&found)?;
    }
    let problem = || found.problem.clone().unwrap_or_else(|| "there is no proof".to_owned());
    let hint = "name servers may take some time until they know of a new record".to_owned();
    match (found.state, &found.problem) {
        (DomainState::Verified, None) if json => Ok(()),
        (DomainState::Verified, None) => output::line(&format!("{name} is verified")),
        (DomainState::Verified, Some(problem)) => {
            output::note(&format!(
                "torpor: warning: {name} leads on for a few days only: {problem}"
            ));
            Ok(())
        }
        (DomainState::Pending | DomainState::Failed, _) => {
            Err(Error::Failed { message: problem(), hint: Some(hint) })
        }
    }
}

fn records(domain: &Kept) -> String {
    let row = |record: &torpor_protocol::domain::DomainRecord| {
        vec![plain(&record.kind), plain(&record.name), plain(&record.value), plain(&record.purpose)]
    };
    let rows = domain.records.iter().map(row).collect();
    output::table(&["TYPE", "NAME", "VALUE", "PURPOSE"], rows)
}

fn table(domains: &[Kept], now_ms: u64) -> String {
    let row = |domain: &Kept| {
        let target = domain.target.as_ref().map(ToString::to_string);
        vec![
            domain.name.to_string(),
            domain.state.as_str().to_owned(),
            target.unwrap_or_else(|| "-".to_owned()),
            units::show_age(domain.created_at_ms, now_ms),
            plain(domain.problem.as_deref().unwrap_or("-")),
        ]
    };
    let rows = domains.iter().map(row).collect();
    output::table(&["DOMAIN", "STATE", "LEADS TO", "AGE", "PROBLEM"], rows)
}

/// As a shell wants it.
fn quoted(name: &DomainName) -> String {
    if name.is_wildcard() { format!("'{name}'") } else { name.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_kept_from_the_shell() {
        assert_eq!(quoted(&"*.example.org".parse().unwrap()), "'*.example.org'");
        assert_eq!(quoted(&"a.example.org".parse().unwrap()), "a.example.org");
    }
}
