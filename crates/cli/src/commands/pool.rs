//! `torpor pool`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_protocol::snapshot::{CreatePool, Pool as Kept, PoolList};
use torpor_protocol::{ErrorCode, Name, Network};

use super::policy::ResourceArgs;
use crate::client::{Client, Route};
use crate::error::Result;
use crate::output::{self, plain};
use crate::progress::Progress;
use crate::units;

/// Keep machines ready ahead: sandboxes of the same kind are taken from them at once.
///
/// The machines of a pool are frozen and use no processor time. A sandbox is taken from a pool that
/// has the same image or snapshot, resources and network; the pool is refilled in the background.
#[derive(Debug, Args)]
pub(super) struct Pool {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(Create),
    /// List pools.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show all about a pool.
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

/// Make a pool and print its name; it fills in the background.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor pool create plain --size 4\n  \
    torpor pool create agents --size 8 --snapshot base")]
struct Create {
    /// A name for it; it must be free.
    name: Name,
    /// How many machines are kept ready.
    #[arg(long, value_name = "N")]
    size: usize,
    /// Name or id of an image [default: torpor/base].
    #[arg(long)]
    image: Option<String>,
    /// Name or id of a memory snapshot, instead of an image.
    #[arg(long, conflicts_with = "image")]
    snapshot: Option<String>,
    #[command(flatten)]
    resources: ResourceArgs,
    /// For sandboxes that reach nothing outside.
    #[arg(long)]
    no_internet: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Create {
    async fn run(self, client: &Client) -> Result<()> {
        let json = self.json;
        let progress = Progress::waiting(format!("making the pool {}", self.name));
        let request = CreatePool {
            name: self.name,
            size: self.size,
            image: self.image,
            snapshot: self.snapshot,
            cpus: self.resources.cpus,
            memory_mib: self.resources.memory,
            disk_mib: self.resources.disk,
            network: Network { internet: !self.no_internet },
        };
        let made: Result<Kept> = client.post(&Route::new("/v1/pools"), &request).await;
        let pool = made.map_err(|error| error.naming_snapshot(request.snapshot.as_deref()))?;
        drop(progress);
        match json {
            true => output::json(&pool),
            false => output::line(pool.name.as_str()),
        }
    }
}

impl Pool {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::new("/v1/pools");
        match self.action {
            Action::Create(create) => create.run(client).await?,
            Action::Ls { json } => {
                let list: PoolList = client.get(&route).await?;
                match json {
                    true => output::json(&list)?,
                    false => output::print(&table(&list.pools))?,
                }
            }
            Action::Show { name, json } => {
                let pool: Kept = client.get(&route.part(name.as_str())).await?;
                match json {
                    true => output::json(&pool)?,
                    false => output::print(&output::fields(&describe(&pool)))?,
                }
            }
            Action::Rm { names, force } => remove(client, &names, force).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn remove(client: &Client, names: &[Name], force: bool) -> Result<()> {
    for name in names {
        match client.delete(&Route::new("/v1/pools").part(name.as_str())).await {
            Ok(()) => output::line(name.as_str())?,
            Err(error) if force && error.code() == Some(ErrorCode::NotFound) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn table(pools: &[Kept]) -> String {
    let row = |pool: &Kept| {
        vec![
            pool.name.to_string(),
            format!("{}/{}", pool.ready, pool.size),
            from(pool),
            pool.resources.cpus.to_string(),
            units::show_mib(pool.resources.memory_mib),
            hit_rate(pool),
        ]
    };
    let header = ["NAME", "READY", "FROM", "CPUS", "MEM", "HITS"];
    output::table(&header, pools.iter().map(row).collect())
}

fn describe(pool: &Kept) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("name", pool.name.to_string()),
        ("ready", format!("{} of {}", pool.ready, pool.size)),
        ("from", from(pool)),
        ("cpus", pool.resources.cpus.to_string()),
        ("memory", units::show_mib(pool.resources.memory_mib)),
        ("disk", units::show_mib(pool.resources.disk_mib)),
        ("internet", if pool.network.internet { "yes" } else { "no" }.to_owned()),
        ("hits", hit_rate(pool)),
    ];
    if let Some(reason) = &pool.reason {
        fields.push(("last refill", format!("failed: {}", plain(reason))));
    }
    fields
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
