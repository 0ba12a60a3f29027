//! `torpor service`

mod deploy;
mod invoke;
mod logs;
mod show;
mod source;
mod traffic;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::hosting::{
    HostedService, RevisionList, Rollback, ScaleChange, ServiceList, UpdateService,
};
use torpor_protocol::{ErrorCode, Name};

use super::policy::{Idle, parse_idle};
use super::removal::remove;
use crate::error::{Error, Result};
use crate::output;

/// Manage services: long-lived programs with a stable address.
///
/// A service has revisions, which never change, and instances of them, which are sandboxes: they sleep when nobody
/// comes and wake with the next request.
#[derive(Debug, Args)]
pub(super) struct Service {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Deploy(Box<deploy::Deploy>),
    /// List services.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show details of a service: its addresses, traffic, revisions and instances.
    #[command(visible_alias = "inspect")]
    Show {
        name: Name,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List the revisions of a service.
    Revisions {
        name: Name,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    Traffic(traffic::Traffic),
    /// Give all traffic to an earlier revision.
    Rollback {
        name: Name,
        /// Default: the older one of a canary, else the one that had the traffic before.
        #[arg(long, value_name = "N")]
        revision: Option<u32>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    Scale(Scale),
    Invoke(invoke::Invoke),
    Logs(logs::Logs),
    /// Remove services with their revisions, instances and addresses.
    Rm {
        #[arg(required = true)]
        names: Vec<Name>,
        /// Remove a revision of the service only, or cancel its deploy.
        #[arg(long, value_name = "N")]
        revision: Option<u32>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
}

/// Change how many instances a service has, and who may come.
#[derive(Debug, Args)]
struct Scale {
    name: Name,
    /// So many never sleep.
    #[arg(long, value_name = "N")]
    min: Option<u32>,
    /// Never more than this.
    #[arg(long, value_name = "N")]
    max: Option<u32>,
    /// Requests that one instance has at the same time.
    #[arg(long, value_name = "N")]
    concurrency: Option<u32>,
    /// An instance sleeps when it had no request for so long, or `never`.
    #[arg(long, value_name = "DURATION", value_parser = parse_idle)]
    idle_after: Option<Idle>,
    /// Everybody may come.
    #[arg(long, conflicts_with = "private")]
    public: bool,
    /// Who comes needs a token or an API key.
    #[arg(long)]
    private: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// `/v1/services`
fn route() -> Route {
    Route::new("/v1/services")
}

fn of(name: &Name) -> Route {
    route().part(name.as_str())
}

impl Service {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Deploy(verb) => verb.run(client).await?,
            Action::Ls { json } => {
                let list: ServiceList = client.list(&route()).await?;
                output::show(json, &list, || show::services(&list.services))?;
            }
            Action::Show { name, json } => {
                let service: HostedService = client.get(&of(&name)).await?;
                output::show(json, &service, || show::describe(&service))?;
            }
            Action::Revisions { name, json } => {
                let service: HostedService = client.get(&of(&name)).await?;
                let list = RevisionList { revisions: service.revisions.clone(), next_cursor: None };
                output::show(json, &list, || show::revisions(&service))?;
            }
            Action::Traffic(verb) => verb.run(client).await?,
            Action::Rollback { name, revision, json } => {
                let wish = Rollback { revision };
                let service: HostedService =
                    client.post(&of(&name).then("/rollback"), &wish).await?;
                output::show(json, &service, || show::traffic(&service))?;
            }
            Action::Scale(verb) => verb.run(client).await?,
            Action::Invoke(verb) => verb.run(client).await?,
            Action::Logs(verb) => verb.run(client).await?,
            Action::Rm { names, revision: None, force } => {
                remove(client, &names, of, force, ErrorCode::NotFound).await?;
            }
            Action::Rm { names, revision: Some(revision), force } => {
                let [name] = names.as_slice() else {
                    return Err(Error::usage("--revision is of one service"));
                };
                let route =
                    |revision: &u32| of(name).then("/revisions").part(&revision.to_string());
                remove(client, &[revision], route, force, ErrorCode::NotFound).await?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Scale {
    async fn run(self, client: &Client) -> Result<()> {
        let update = UpdateService {
            public: (self.public || self.private).then_some(self.public),
            scale: ScaleChange {
                min: self.min,
                max: self.max,
                concurrency: self.concurrency,
                idle_after_ms: self.idle_after.map(Idle::millis),
            },
            sticky: None,
        };
        if update == UpdateService::default() {
            return Err(Error::usage("say what is to change, such as --max 10"));
        }
        let service: HostedService = client.patch(&of(&self.name), &update).await?;
        output::show(self.json, &service, || show::describe(&service))
    }
}
