//! `torpor key`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::api::{ApiKey, CreateKey, KeyList};

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Manage API keys.
#[derive(Debug, Args)]
pub(super) struct Key {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Create a key and print it; it is not shown again.
    ///
    /// From the first key on, every request needs one.
    Create {
        /// Who or what it is for.
        label: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List keys.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Revoke a key.
    Rm {
        /// Its id.
        id: String,
    },
}

impl Key {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::new("/v1/keys");
        match self.action {
            Action::Create { label, json } => {
                let key: ApiKey = client.post(&route, &CreateKey { label }).await?;
                match (&key.secret, json) {
                    (Some(secret), false) => {
                        output::line(&plain(secret))?;
                        output::note("keep it: it is not shown again; use it with TORPOR_API_KEY");
                    }
                    (Some(_), true) | (None, _) => output::json(&key)?,
                }
            }
            Action::Ls { json } => {
                let list: KeyList = client.list(&route).await?;
                output::show(json, &list, || table(&list, units::now_ms()))?;
            }
            Action::Rm { id } => {
                client.delete(&route.part(&id)).await?;
                output::line(&plain(&id))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(list: &KeyList, now_ms: u64) -> String {
    let row = |key: &ApiKey| {
        let age = units::show_age(key.created_at_ms, now_ms);
        vec![plain(&key.id), plain(&key.label), format!("{}…", plain(&key.prefix)), age]
    };
    output::table(&["ID", "LABEL", "KEY", "AGE"], list.keys.iter().map(row).collect())
}
