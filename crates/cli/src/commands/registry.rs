//! `torpor registry`
//!
//! A password never comes from our arguments: everybody on this computer can read those.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{RegistryList, RegistryLogin, SetRegistryLogin};

use super::removal::remove;
use super::secret::set::hidden;
use crate::error::{Error, Result};
use crate::output::{self, plain};

/// Manage logins of registries that images are pulled from and pushed to.
///
/// Passwords are encrypted on disk and never given back. The daemon also knows the logins that
/// `docker login` left for the user it runs as.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor registry login ghcr.io -u me         asks for the password\n  \
    printenv TOKEN | torpor registry login docker.io -u me"
)]
pub(super) struct Registry {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Log in; the password, or a token, comes on standard input.
    Login {
        /// Host, perhaps with a port; docker.io for names without a host.
        #[arg(default_value = "docker.io")]
        registry: String,
        /// Who we are there.
        #[arg(short, long)]
        username: String,
        /// Print what is kept, but not the password, as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Forget logins.
    Logout {
        #[arg(required = true, value_name = "REGISTRY")]
        registries: Vec<String>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
    /// List registries with a login.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

fn route() -> Route {
    Route::new("/v1/registries")
}

impl Registry {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Login { registry, username, json } => {
                let question = format!("password of {username} (it is not shown):");
                let password = hidden(&question).await?;
                if password.is_empty() {
                    let message = "the password is empty".to_owned();
                    return Err(Error::Usage { message, hint: None });
                }
                let login = SetRegistryLogin { username, password };
                let kept: RegistryLogin = client.put(&route().part(&registry), &login).await?;
                output::show_line(json, &kept, &plain(&kept.registry))?;
            }
            Action::Logout { registries, force } => {
                let route = |registry: &String| route().part(registry);
                let removed = remove(client, &registries, route, force, ErrorCode::NotFound).await;
                let hint = "list them with: torpor registry ls";
                removed.map_err(|error| error.with_hint(ErrorCode::NotFound, hint))?;
            }
            Action::Ls { json } => {
                let list: RegistryList = client.get(&route()).await?;
                output::show(json, &list, || table(&list.registries))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(logins: &[RegistryLogin]) -> String {
    let row = |login: &RegistryLogin| vec![plain(&login.registry), plain(&login.username)];
    output::table(&["REGISTRY", "USER"], logins.iter().map(row).collect())
}
