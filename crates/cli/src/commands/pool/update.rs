//! `torpor pool update`
//!
//! The API replaces a pool as a whole, so what is there goes along.

use clap::Args;
use torpor_client::Client;
use torpor_protocol::Name;
use torpor_protocol::api::Standby;
use torpor_protocol::snapshot::{CreatePool, Pool};

use super::route;
use crate::commands::policy::{PolicyChanges, ResourceArgs};
use crate::commands::reach::ReachChanges;
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;

/// Change a pool. Sandboxes that were claimed from it stay as they are.
///
/// What is not mentioned stays as it is; an image is looked up again by its name. Machines of
/// another kind than before are made anew.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor pool update agents --size 16 --max 200\n  \
    torpor pool update servers --image web-2 -- npm run serve")]
pub(super) struct Update {
    /// Which one.
    name: Name,
    /// How many machines are kept ready.
    #[arg(long, value_name = "N")]
    size: Option<usize>,
    /// How many sandboxes may be claimed from it at the same time.
    #[arg(long, value_name = "N")]
    max: Option<usize>,
    /// Any number of sandboxes may be claimed from it.
    #[arg(long, conflicts_with = "max")]
    no_max: bool,
    /// Name or id of an image.
    #[arg(long)]
    image: Option<String>,
    /// Name or id of a memory snapshot, instead of an image.
    #[arg(long, conflicts_with = "image")]
    snapshot: Option<String>,
    #[command(flatten)]
    resources: ResourceArgs,
    #[command(flatten)]
    reach: ReachChanges,
    #[command(flatten)]
    policy: PolicyChanges,
    /// Sandboxes of it start nothing any more.
    #[arg(long, conflicts_with = "entrypoint")]
    no_entrypoint: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
    /// Program and arguments that sandboxes of it start.
    #[arg(last = true, value_name = "ENTRYPOINT")]
    entrypoint: Vec<String>,
}

impl Update {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let (json, route) = (self.json, route().part(self.name.as_str()));
        let pool: Pool = client.get(&route).await?;
        let before = as_it_is(&pool);
        let request = self.request(&pool);
        if request == before {
            return Err(Error::usage("nothing is to be changed"));
        }
        let progress = Progress::waiting(format!("changing the pool {}", pool.name));
        let changed = client.put(&route, &request).await;
        let pool: Pool =
            changed.map_err(|error| error.naming_snapshot(request.snapshot.as_deref()))?;
        drop(progress);
        output::show_line(json, &pool, pool.name.as_str())
    }

    fn request(self, pool: &Pool) -> CreatePool {
        let were = as_it_is(pool);
        let (image, snapshot) = match (self.image, self.snapshot) {
            (None, None) => (were.image, were.snapshot),
            other => other,
        };
        let standby = self.policy.standby(&pool.standby).unwrap_or_default();
        CreatePool {
            name: were.name,
            size: self.size.unwrap_or(were.size),
            max: self.max.or(were.max).filter(|_| !self.no_max),
            image,
            // A memory snapshot goes on in the engine that took it.
            engine: were.engine.filter(|_| snapshot.is_none()),
            snapshot,
            cpus: self.resources.cpus.or(were.cpus),
            memory_mib: self.resources.memory.or(were.memory_mib),
            disk_mib: self.resources.disk.or(were.disk_mib),
            network: self.reach.over(&were.network).unwrap_or(were.network),
            ports: were.ports,
            entrypoint: match (self.no_entrypoint, self.entrypoint.is_empty()) {
                (true, _) => Vec::new(),
                (false, true) => were.entrypoint,
                (false, false) => self.entrypoint,
            },
            lifetime: self.policy.lifetime(were.lifetime).unwrap_or(were.lifetime),
            standby: as_given(standby.over(pool.standby.clone())),
        }
    }
}

/// What to ask for to get the pool that is there.
fn as_it_is(pool: &Pool) -> CreatePool {
    CreatePool {
        name: pool.name.clone(),
        size: pool.size,
        max: pool.max,
        // A snapshot comes with its image.
        image: pool.snapshot.is_none().then(|| pool.image.clone()),
        snapshot: pool.snapshot.as_ref().map(ToString::to_string),
        engine: pool.engine.clone(),
        cpus: Some(pool.resources.cpus),
        memory_mib: Some(pool.resources.memory_mib),
        disk_mib: Some(pool.resources.disk_mib),
        network: pool.network.clone(),
        ports: pool.ports.clone(),
        entrypoint: pool.entrypoint.clone(),
        lifetime: pool.lifetime,
        standby: as_given(pool.standby.clone()),
    }
}

fn as_given(policy: torpor_protocol::StandbyPolicy) -> Standby {
    Standby {
        idle_after_ms: Some(Some(policy.idle_after_ms).filter(|ms| *ms > 0)),
        auto_wake: Some(policy.auto_wake),
        hooks: Some(policy.hooks),
    }
}
