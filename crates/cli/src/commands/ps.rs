//! `torpor ps`

use std::cmp::Reverse;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use torpor_client::Client;
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{Name, State, Status};

use super::{ended, parse_pair, sandboxes};
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::units;

/// List sandboxes.
#[derive(Debug, Args)]
pub(super) struct Ps {
    /// Also those that are being removed at this moment.
    #[arg(short, long)]
    all: bool,
    /// Only those with this label; may be given several times.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Only those in this state: creating, running, standby, failed, terminated.
    #[arg(long, value_parser = parse_state)]
    state: Option<State>,
    /// Those that are gone instead, last ended first.
    #[arg(long, conflicts_with_all = ["all", "state"])]
    ended: bool,
    /// With --ended: so many at most, 0 is all that are remembered.
    #[arg(long, value_name = "N", default_value = "100", requires = "ended")]
    limit: usize,
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
        match self.ended {
            true => self.ended(client).await?,
            false => self.living(client).await?,
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn ended(&self, client: &Client) -> Result<()> {
        let list = ended::list(client, &self.label, self.limit).await?;
        if self.json {
            return output::json(&list);
        }
        if self.quiet {
            return output::ids(list.sandboxes.iter().map(|ended| &ended.id));
        }
        output::print(&table_of_ended(&list.sandboxes, units::now_ms()))?;
        if list.next_cursor.is_some() {
            output::note("there are more: --limit N shows so many, --limit 0 all");
        }
        Ok(())
    }

    async fn living(&self, client: &Client) -> Result<()> {
        let state = self.state.map(State::as_str);
        let shown = |state| self.all || self.state.is_some() || state != State::Terminated;
        if self.json {
            // As the daemon wrote it: there may be thousands.
            let raw: Vec<Box<RawValue>> = client.sandboxes(&self.label, state).await?;
            return output::json(&Rows { sandboxes: sorted(raw, shown)? });
        }
        let mut statuses: Vec<Status> = client.sandboxes(&self.label, state).await?;
        statuses.retain(|status| shown(status.state));
        statuses.sort_by_key(|status| Reverse(status.created_at_ms));
        if self.quiet {
            return output::ids(statuses.iter().map(|status| &status.id));
        }
        output::print(&table(&statuses, units::now_ms()))
    }
}

/// A list whose sandboxes are JSON already.
#[derive(Serialize)]
struct Rows {
    sandboxes: Vec<Box<RawValue>>,
}

/// Those in a state that is shown, newest first.
fn sorted(raw: Vec<Box<RawValue>>, shown: impl Fn(State) -> bool) -> Result<Vec<Box<RawValue>>> {
    #[derive(Deserialize)]
    struct Key {
        state: State,
        /// It sorts as text.
        created_at: String,
    }
    let mut rows = Vec::with_capacity(raw.len());
    for row in raw {
        let key: Key = serde_json::from_str(row.get())
            .map_err(|error| Error::garbled("can't read the daemon's answer", error))?;
        if shown(key.state) {
            rows.push((Reverse(key.created_at), row));
        }
    }
    rows.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

fn table_of_ended(ended: &[ArchivedSandbox], now_ms: u64) -> String {
    let row = |ended: &ArchivedSandbox| {
        vec![
            show_name(ended.spec.name.as_ref()),
            ended.id.to_string(),
            plain(&ended.spec.image),
            units::show_duration(lived(ended)),
            units::show_age(ended.ended_at_ms, now_ms),
            ended.reason.map_or_else(|| "-".to_owned(), |reason| reason.to_string()),
        ]
    };
    let header = ["NAME", "ID", "IMAGE", "LIVED", "ENDED", "REASON"];
    output::table(&header, ended.iter().map(row).collect())
}

fn lived(ended: &ArchivedSandbox) -> Duration {
    Duration::from_millis(ended.ended_at_ms.saturating_sub(ended.created_at_ms))
}

fn show_name(name: Option<&Name>) -> String {
    name.map_or_else(|| "-".to_owned(), |name| plain(name.as_str()))
}

fn table(statuses: &[Status], now_ms: u64) -> String {
    let header = ["NAME", "ID", "STATE", "IMAGE", "CPUS", "MEM", "AGE", "LAST USED", "WAKES"];
    let row = |status: &Status| {
        vec![
            show_name(status.spec.name.as_ref()),
            status.id.to_string(),
            sandboxes::show_status(status),
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
