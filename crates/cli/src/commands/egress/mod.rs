//! `torpor egress`

mod show;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::Method;
use torpor_client::{Client, Route, body};
use torpor_protocol::SandboxRef;
use torpor_protocol::egress::{EgressEvents, EgressLine, Gateway, GatewayList};

use crate::error::Result;
use crate::output::{self, plain};

/// Events of one answer of the daemon at most.
const EVENTS_MAX: u64 = 1000;

/// Show what sandboxes send out, what was refused, and where secrets went.
///
/// Every decision about a name, a connection and a request is an event: when, which sandbox, what, the
/// verdict and the rule that decided. No event holds a secret, a query or a body. Nobody is woken for it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor egress tail web\n  torpor egress tail --denied\n  \
    torpor egress ls web -n 20 --json | jq '.events[].host'\n  torpor egress gateways")]
pub(super) struct Egress {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Follow what a sandbox, or every one, sends out.
    Tail {
        /// Name or id; without it, all sandboxes.
        sandbox: Option<SandboxRef>,
        #[command(flatten)]
        which: Which,
        /// As JSON, one event a line.
        #[arg(long)]
        json: bool,
    },
    /// List what a sandbox sent out last, also of one that is gone (by its id).
    Ls {
        /// Name or id.
        sandbox: SandboxRef,
        #[command(flatten)]
        which: Which,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List egress gateways.
    Gateways {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Which events are shown.
#[derive(Debug, Args)]
struct Which {
    /// The newest so many of what is remembered [default: 10 to begin with, 100 in a list].
    #[arg(
        short = 'n', long, value_name = "N",
        value_parser = clap::value_parser!(u64).range(0..=EVENTS_MAX)
    )]
    lines: Option<u64>,
    /// Only what was refused.
    #[arg(long)]
    denied: bool,
}

impl Which {
    fn route(&self, sandbox: Option<&SandboxRef>, usual: u64) -> Route {
        let route = match sandbox {
            Some(sandbox) => Route::sandbox(sandbox).then("/egress"),
            None => Route::new("/v1/egress"),
        };
        let route = route.query("limit", &self.lines.unwrap_or(usual).to_string());
        if self.denied { route.query("verdict", "denied") } else { route }
    }
}

impl Egress {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Tail { sandbox, which, json } => {
                let route = which.route(sandbox.as_ref(), 10).query("follow", "true");
                tail(client, &route, sandbox.is_none(), json).await?;
            }
            Action::Ls { sandbox, which, json } => {
                let mut list: EgressEvents = client.get(&which.route(Some(&sandbox), 100)).await?;
                list.events.reverse();
                match json {
                    true => output::json(&list)?,
                    false => {
                        let shown = list.events.iter().map(|event| show::line(event, false));
                        output::print(&shown.collect::<String>())?;
                    }
                }
            }
            Action::Gateways { json } => {
                let list: GatewayList = client.list(&Route::new("/v1/gateways")).await?;
                output::show(json, &list, || table(&list.gateways))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Prints until the sandbox ends or the daemon stops.
async fn tail(client: &Client, route: &Route, whose: bool, json: bool) -> Result<()> {
    let mut lines = client.lines::<EgressLine>(Method::GET, route, body::empty()).await?;
    while let Some(line) = lines.next().await? {
        match line {
            line if json => output::line(&output::compact(&line)?)?,
            EgressLine::Egress(event) => output::print(&show::line(&event, whose))?,
            EgressLine::Missed { missed } => {
                output::note(&format!("{missed} events came faster than they could be shown"));
            }
        }
    }
    Ok(())
}

fn table(gateways: &[Gateway]) -> String {
    let row = |gateway: &Gateway| vec![gateway.name.to_string(), plain(&gateway.through)];
    output::table(&["NAME", "THROUGH"], gateways.iter().map(row).collect())
}
