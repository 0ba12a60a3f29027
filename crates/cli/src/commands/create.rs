//! `torpor create`

use std::process::ExitCode;

use clap::Args;
use torpor_protocol::api::{CreateSandbox, DEFAULT_IMAGE};
use torpor_protocol::{ErrorCode, Lifetime, Name, Network, Status};

use super::policy::{LifetimeArgs, ResourceArgs, StandbyArgs};
use super::{image, parse_env, parse_pair, sandboxes};
use crate::client::{Client, Route};
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;

/// Create a sandbox and print its name, or its id if it has none.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor create --name web --memory 2g --cpus 2\n  \
    torpor create --image python --env TOKEN --expire-idle 7d --label team=a\n  \
    torpor create --snapshot base --idle-after 1m --after-wake 'date >> /var/log/wakes'")]
pub(super) struct Create {
    /// A name to find it by; it must be free.
    #[arg(long)]
    name: Option<Name>,
    /// Name or id of an image [default: torpor/base].
    #[arg(long)]
    image: Option<String>,
    /// Name or id of a snapshot to begin from, instead of an image.
    #[arg(long, conflicts_with = "image")]
    snapshot: Option<String>,
    #[command(flatten)]
    resources: ResourceArgs,
    /// Environment variable for every process; KEY alone passes on our own.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Label to find it by.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Let it reach nothing outside.
    #[arg(long)]
    no_internet: bool,
    #[command(flatten)]
    standby: StandbyArgs,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    /// Do not wait until it runs.
    #[arg(long)]
    no_wait: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

async fn create(client: &Client, route: &Route, request: &CreateSandbox) -> Result<Status> {
    let what = request.name.as_ref().map_or("a sandbox", Name::as_str);
    let _progress = Progress::waiting(format!("creating {what}"));
    let created = client.post(route, request).await;
    created.map_err(|error| error.naming_snapshot(request.snapshot.as_deref()))
}

/// Whether the default image is wanted and not there.
fn lacks_base(error: &Error, request: &CreateSandbox) -> bool {
    let image = request.image.as_deref().unwrap_or(DEFAULT_IMAGE);
    let wanted = request.snapshot.is_none() && image == DEFAULT_IMAGE;
    wanted && error.code() == Some(ErrorCode::ImageNotFound)
}

impl Create {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let mut route = Route::new("/v1/sandboxes");
        if self.no_wait {
            route = route.query("wait", "false");
        }
        let json = self.json;
        let request = self.request();
        let status = match create(client, &route, &request).await {
            // Somebody's first sandbox: the default image is made when it is first needed.
            Err(error) if lacks_base(&error, &request) => {
                output::note("the default image is made first; this is done once");
                image::base::ensure(client).await?;
                create(client, &route, &request).await?
            }
            created => created?,
        };
        match json {
            true => output::json(&status)?,
            false => output::line(sandboxes::title(&status))?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn request(self) -> CreateSandbox {
        CreateSandbox {
            name: self.name,
            image: self.image,
            snapshot: self.snapshot,
            cpus: self.resources.cpus,
            memory_mib: self.resources.memory,
            disk_mib: self.resources.disk,
            pids: None,
            env: self.env.into_iter().collect(),
            labels: self.label.into_iter().collect(),
            network: Network { internet: !self.no_internet },
            lifetime: self.lifetime.over(Lifetime::default()),
            standby: self.standby.standby(),
        }
    }
}
