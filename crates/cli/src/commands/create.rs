//! `torpor create`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use torpor_protocol::api::{CreateSandbox, DEFAULT_IMAGE};
use torpor_protocol::{ErrorCode, Lifetime, Name, Network, Status};

use super::{image, parse_env, parse_pair, sandboxes};
use crate::client::{Client, Route};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::{output, units};

/// Create a sandbox and print its name, or its id if it has none.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor create --name web --memory 2g --cpus 2\n  \
    torpor create --image python --env TOKEN --expire-idle 7d --label team=a")]
pub(super) struct Create {
    /// A name to find it by; it must be free.
    #[arg(long)]
    name: Option<Name>,
    /// Name or id of an image [default: torpor/base].
    #[arg(long)]
    image: Option<String>,
    /// Processor cores; fractions are allowed [default: 1].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    cpus: Option<f64>,
    /// Memory, such as 512m or 2g [default: 1g].
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mib)]
    memory: Option<u64>,
    /// Disk it may write on top of its image, such as 20g [default: 10g].
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mib)]
    disk: Option<u64>,
    /// Environment variable for every process; KEY alone passes on our own.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Label to find it by.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Let it reach nothing outside.
    #[arg(long)]
    no_internet: bool,
    /// Remove it so long after its creation, such as 30d.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    max_age: Option<Duration>,
    /// Remove it when nobody used it for so long, such as 7d.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    expire_idle: Option<Duration>,
    /// Remove it at this time: 2027-01-31 (UTC) or 2027-01-31T12:00:00+01:00.
    #[arg(long, value_name = "DATE", value_parser = units::parse_time)]
    expire_at: Option<u64>,
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
    client.post(route, request).await
}

/// Whether the default image is wanted and not there.
fn lacks_base(error: &Error, request: &CreateSandbox) -> bool {
    let wanted = request.image.as_deref().unwrap_or(DEFAULT_IMAGE) == DEFAULT_IMAGE;
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
            cpus: self.cpus,
            memory_mib: self.memory,
            disk_mib: self.disk,
            pids: None,
            env: self.env.into_iter().collect(),
            labels: self.label.into_iter().collect(),
            network: Network { internet: !self.no_internet },
            lifetime: Lifetime {
                max_age_secs: self.max_age.map(|age| age.as_secs()),
                expire_idle_secs: self.expire_idle.map(|idle| idle.as_secs()),
                expire_at: self.expire_at,
            },
        }
    }
}
