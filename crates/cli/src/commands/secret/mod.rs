//! `torpor secret`

pub(super) mod set;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::api::{Secret as Kept, SecretList};
use torpor_protocol::{ErrorCode, SecretName};

use super::removal::remove;
use crate::error::Result;
use crate::{output, units};

/// Manage secrets.
///
/// Values are encrypted on disk and never given back. A sandbox that was created with --route or --grant
/// never sees one: it is put into its requests on their way out, at once in its newest version. One that
/// was created with --secret NAME has the value in the variable NAME of every process, and gets a new one
/// when it starts, is forked or wakes.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor secret set TOKEN                     asks for the value\n  \
    printenv TOKEN | torpor secret set TOKEN\n  \
    torpor secret set OPENAI_KEY --host api.openai.com\n  \
    torpor create --name web --route 'api.openai.com: Authorization=Bearer {{SECRET:OPENAI_KEY}}'\n  \
    torpor create --name old --secret TOKEN"
)]
pub(super) struct Secret {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Set(set::Set),
    /// List secrets, without their values.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove secrets; processes that have their values keep them.
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<SecretName>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
}

fn route() -> Route {
    Route::new("/v1/secrets")
}

impl Secret {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Set(set) => set.run(client).await?,
            Action::Ls { json } => {
                let list: SecretList = client.list(&route()).await?;
                output::show(json, &list, || table(&list.secrets, units::now_ms()))?;
            }
            Action::Rm { names, force } => {
                let route = |name: &SecretName| route().part(name.as_str());
                let removed = remove(client, &names, route, force, ErrorCode::NotFound).await;
                let hint = "list them with: torpor secret ls";
                removed.map_err(|error| error.with_hint(ErrorCode::NotFound, hint))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn hosts(secret: &Kept) -> String {
    match &secret.hosts[..] {
        [] => "-".to_owned(),
        hosts => hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    }
}

fn table(secrets: &[Kept], now_ms: u64) -> String {
    let row = |secret: &Kept| {
        vec![
            secret.name.to_string(),
            secret.version.to_string(),
            hosts(secret),
            units::show_age(secret.created_at_ms, now_ms),
            units::show_age(secret.updated_at_ms, now_ms),
        ]
    };
    output::table(
        &["NAME", "VERSION", "HOSTS", "AGE", "CHANGED"],
        secrets.iter().map(row).collect(),
    )
}
