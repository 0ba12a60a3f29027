//! `torpor pool`

mod create;
mod update;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::snapshot::{Pool as Kept, PoolList};
use torpor_protocol::{ErrorCode, Name};

use super::inspect;
use super::removal::remove;
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Manage pools of machines that are started ahead.
///
/// The machines of a pool are frozen and use no processor time. A sandbox is taken from a pool that
/// has the same image or snapshot, resources and network, or that it names (torpor create --pool); the
/// pool is refilled in the background.
#[derive(Debug, Args)]
pub(super) struct Pool {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(create::Create),
    Update(update::Update),
    /// List pools.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show details of a pool.
    #[command(visible_alias = "inspect")]
    Show {
        name: Name,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove pools with the machines in them. Sandboxes that came from them live on.
    Rm {
        #[arg(required = true)]
        names: Vec<Name>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
}

fn route() -> Route {
    Route::new("/v1/pools")
}

impl Pool {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Create(verb) => verb.run(client).await?,
            Action::Update(verb) => verb.run(client).await?,
            Action::Ls { json } => {
                let list: PoolList = client.list(&route()).await?;
                output::show(json, &list, || table(&list.pools))?;
            }
            Action::Show { name, json } => {
                let pool: Kept = client.get(&route().part(name.as_str())).await?;
                output::show(json, &pool, || output::fields(&describe(&pool)))?;
            }
            Action::Rm { names, force } => {
                let route = |name: &Name| route().part(name.as_str());
                remove(client, &names, route, force, ErrorCode::NotFound).await?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(pools: &[Kept]) -> String {
    let row = |pool: &Kept| {
        vec![
            pool.name.to_string(),
            format!("{}/{}", pool.ready, pool.size),
            claimed(pool, "/"),
            from(pool),
            pool.resources.cpus.to_string(),
            units::show_mib(pool.resources.memory_mib),
            hit_rate(pool),
        ]
    };
    let header = ["NAME", "READY", "CLAIMED", "FROM", "CPUS", "MEM", "HITS"];
    output::table(&header, pools.iter().map(row).collect())
}

fn describe(pool: &Kept) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("name", pool.name.to_string()),
        ("ready", format!("{} of {}", pool.ready, pool.size)),
        ("claimed", claimed(pool, " of at most ")),
        ("from", from(pool)),
        ("cpus", pool.resources.cpus.to_string()),
        ("memory", units::show_mib(pool.resources.memory_mib)),
        ("disk", units::show_mib(pool.resources.disk_mib)),
        ("internet", inspect::describe_reach(&pool.network)),
        ("sleeps", inspect::describe_sleep(&pool.standby)),
        ("ends", inspect::describe_end(&pool.lifetime)),
        ("hits", hit_rate(pool)),
        ("created", units::show_time(pool.created_at_ms)),
        ("changed", units::show_time(pool.updated_at_ms)),
    ];
    if !pool.entrypoint.is_empty() {
        fields.push(("entrypoint", inspect::describe_command(&pool.entrypoint)));
    }
    if let Some(message) = &pool.message {
        fields.push(("last refill", format!("failed: {}", plain(message))));
    }
    fields
}

/// How many live that were claimed from it, of how many that may.
fn claimed(pool: &Kept, of: &str) -> String {
    match pool.max {
        Some(max) => format!("{}{of}{max}", pool.claimed.len()),
        None => pool.claimed.len().to_string(),
    }
}

/// The snapshot, else the image.
fn from(pool: &Kept) -> String {
    match &pool.snapshot {
        Some(snapshot) => snapshot.to_string(),
        None => plain(&pool.image),
    }
}

fn hit_rate(pool: &Kept) -> String {
    let asked = pool.hits.saturating_add(pool.misses);
    if asked == 0 {
        return "-".to_owned();
    }
    let percent = pool.hits as f64 * 100.0 / asked as f64;
    format!("{percent:.0}% of {asked}")
}
