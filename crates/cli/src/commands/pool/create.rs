//! `torpor pool create`

use clap::Args;
use torpor_client::Client;
use torpor_protocol::snapshot::{CreatePool, Pool};
use torpor_protocol::{Lifetime, Name};

use super::route;
use crate::commands::policy::{LifetimeArgs, ResourceArgs, StandbyArgs};
use crate::commands::reach::ReachArgs;
use crate::error::Result;
use crate::output;
use crate::progress::Progress;

/// Create a pool and print its name; it fills in the background.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor pool create plain --size 4\n  \
    torpor pool create agents --size 8 --max 100 --snapshot base\n  \
    torpor pool create servers --size 2 --image web -- npm start")]
pub(super) struct Create {
    /// A name for it; it must be free.
    name: Name,
    /// How many machines are kept ready.
    #[arg(long, value_name = "N")]
    size: usize,
    /// How many sandboxes may be claimed from it at the same time [default: any number].
    #[arg(long, value_name = "N")]
    max: Option<usize>,
    /// Name or id of an image [default: torpor/base].
    #[arg(long)]
    image: Option<String>,
    /// Name or id of a memory snapshot, instead of an image.
    #[arg(long, conflicts_with = "image")]
    snapshot: Option<String>,
    /// What isolates its sandboxes: gvisor, microvm, or auto, the daemon's default.
    #[arg(long, value_name = "KIND")]
    engine: Option<String>,
    #[command(flatten)]
    resources: ResourceArgs,
    #[command(flatten)]
    reach: ReachArgs,
    #[command(flatten)]
    standby: StandbyArgs,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
    /// Program and arguments that sandboxes of it start.
    #[arg(last = true, value_name = "ENTRYPOINT")]
    entrypoint: Vec<String>,
}

impl Create {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let json = self.json;
        let progress = Progress::waiting(format!("making the pool {}", self.name));
        let request = self.request();
        let made = client.post(&route(), &request).await;
        let pool: Pool =
            made.map_err(|error| error.naming_snapshot(request.snapshot.as_deref()))?;
        drop(progress);
        output::show_line(json, &pool, pool.name.as_str())
    }

    fn request(self) -> CreatePool {
        CreatePool {
            name: self.name,
            size: self.size,
            max: self.max,
            image: self.image,
            snapshot: self.snapshot,
            engine: self.engine,
            cpus: self.resources.cpus,
            memory_mib: self.resources.memory,
            disk_mib: self.resources.disk,
            network: self.reach.network(),
            ports: None,
            entrypoint: self.entrypoint,
            lifetime: self.lifetime.over(Lifetime::default()),
            standby: self.standby.standby(),
        }
    }
}
