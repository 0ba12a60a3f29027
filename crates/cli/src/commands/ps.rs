//! `torpor ps`

use std::process::ExitCode;

use clap::Args;
use torpor_protocol::api::SandboxList;
use torpor_protocol::{State, Status};

use super::{parse_pair, sandboxes};
use crate::client::Client;
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// List sandboxes.
#[derive(Debug, Args)]
pub(super) struct Ps {
    /// Also those that are gone.
    #[arg(short, long)]
    all: bool,
    /// Only those with this label; may be given several times.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Only those in this state: creating, running, standby, failed, terminated.
    #[arg(long, value_parser = parse_state)]
    state: Option<State>,
    /// Only ids.
    #[arg(short, long)]
    quiet: bool,
    /// As JSON.
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
}

fn parse_state(text: &str) -> Result<State, String> {
    let found = State::ALL.into_iter().find(|state| state.as_str() == text);
    found.ok_or_else(|| {
        let states = State::ALL.map(State::as_str);
        format!("the states are {}", states.join(", "))
    })
}

impl Ps {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let state = self.state.map(State::as_str);
        let mut statuses = sandboxes::list(client, &self.label, state).await?;
        if !self.all && self.state.is_none() {
            statuses.retain(|status| status.state != State::Terminated);
        }
        statuses.sort_by_key(|status| std::cmp::Reverse(status.created_at_ms));
        if self.json {
            output::json(&SandboxList { sandboxes: statuses, next: None })?;
        } else if self.quiet {
            let ids: String = statuses.iter().map(|status| format!("{}\n", status.id)).collect();
            output::print(&ids)?;
        } else {
            output::print(&table(&statuses, units::now_ms()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(statuses: &[Status], now_ms: u64) -> String {
    let header = ["NAME", "ID", "STATE", "IMAGE", "CPUS", "MEM", "AGE", "LAST USED", "WAKES"];
    let row = |status: &Status| {
        vec![
            status.spec.name.as_ref().map_or_else(|| "-".to_owned(), |name| plain(name.as_str())),
            status.id.to_string(),
            sandboxes::show_state(status.state, status.tier),
            plain(&status.spec.image),
            status.spec.resources.cpus.to_string(),
            units::show_mib(status.spec.resources.memory_mib),
            units::show_age(status.created_at_ms, now_ms),
            units::show_age(status.last_used_at_ms, now_ms),
            status.wakes.to_string(),
        ]
    };
    output::table(&header, statuses.iter().map(row).collect())
}
