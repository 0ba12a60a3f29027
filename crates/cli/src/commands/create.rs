//! `torpor create`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::{CreateSandbox, DEFAULT_IMAGE, PullPolicy};
use torpor_protocol::volume::MountRequest;
use torpor_protocol::{ErrorCode, Lifetime, Name, SecretName, Status};

use super::policy::{LifetimeArgs, ResourceArgs, StandbyArgs};
use super::reach::{PortArgs, ReachArgs};
use super::{image, parse_env, parse_pair, queue, sandboxes, volume};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::{output, units};

/// Create a sandbox and print its name, or its id if it has none.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor create --name web --memory 2g --cpus 2\n  \
    torpor create --image python --env TOKEN --expire-idle 7d --label team=a\n  \
    torpor create --snapshot base --idle-after 1m --after-wake 'date >> /var/log/wakes'\n  \
    torpor create --name api --secret TOKEN --allow 192.0.2.0/24 --expose 8080 -- npm start\n  \
    torpor create --allow '*.pypi.org' --allow 'GET,HEAD api.example.com/v1/' --deny example.org\n  \
    torpor create --route 'api.openai.com: Authorization=Bearer {{SECRET:OPENAI_KEY}}'\n  \
    torpor create --name db -v data:/data -v shared:/team:/mnt/team:ro\n  \
    torpor create --pool agents --queue 10m")]
pub(super) struct Create {
    /// A name to find it by; it must be free.
    #[arg(long)]
    name: Option<Name>,
    /// Name or id of an image, which is pulled from its registry if it is not here [default:
    /// torpor/base].
    #[arg(long)]
    image: Option<String>,
    /// When it is pulled: missing, always or never [default: what the daemon's configuration says].
    #[arg(long, value_name = "WHEN", value_parser = image::parse_policy, requires = "image")]
    pull: Option<PullPolicy>,
    /// Name or id of a snapshot to begin from, instead of an image.
    #[arg(long, conflicts_with = "image")]
    snapshot: Option<String>,
    /// Claim it from this pool: it is what the pool says.
    #[arg(long, conflicts_with_all = ["image", "snapshot", "entrypoint"])]
    pool: Option<Name>,
    /// What isolates it: gvisor, microvm, or auto, the daemon's default.
    #[arg(long, value_name = "KIND", conflicts_with = "pool")]
    engine: Option<String>,
    #[command(flatten)]
    resources: ResourceArgs,
    /// Environment variable for every process; KEY alone passes on our own.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Label to find it by.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Secret that every process gets as a variable, and could give away: --route and --grant keep it
    /// from them; may be given several times.
    #[arg(long, value_name = "NAME")]
    secret: Vec<SecretName>,
    #[command(flatten)]
    reach: ReachArgs,
    #[command(flatten)]
    ports: PortArgs,
    #[command(flatten)]
    standby: StandbyArgs,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    /// Volume or drive at a directory: NAME:PATH, NAME:/FOLDER:PATH for a folder of it, with :ro at its end to
    /// read only; may be given several times.
    #[arg(short, long = "volume", value_name = "NAME:PATH[:ro]", value_parser = volume::parse_mount)]
    volumes: Vec<MountRequest>,
    /// If this host has no room for it, wait so long, or `forever`, instead of being refused.
    #[arg(long, value_name = "DURATION", value_parser = queue::parse)]
    queue: Option<Duration>,
    /// Do not wait until it runs.
    #[arg(long)]
    no_wait: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
    /// Program and arguments to start when it boots.
    #[arg(last = true, value_name = "ENTRYPOINT")]
    entrypoint: Vec<String>,
}

async fn create(client: &Client, request: &CreateSandbox, wait: bool) -> Result<Status> {
    let what = request.name.as_ref().map_or("a sandbox", Name::as_str);
    let progress = Progress::waiting(format!("creating {what}"));
    // Who may have to wait is watched, so that one can say what for.
    let watched = wait && request.queue_ms.is_some();
    let mut route = Route::new("/v1/sandboxes");
    if watched || !wait {
        route = route.query("wait", "false");
    }
    let created = client.post(&route, request).await;
    let status = created.map_err(|error| error.naming_snapshot(request.snapshot.as_deref()))?;
    match watched {
        true => queue::until_it_runs(client, status, &progress).await,
        false => Ok(status),
    }
}

/// Whether the default image is wanted and not there.
fn lacks_base(error: &Error, request: &CreateSandbox) -> bool {
    let image = request.image.as_deref().unwrap_or(DEFAULT_IMAGE);
    let wanted = request.snapshot.is_none() && request.pool.is_none() && image == DEFAULT_IMAGE;
    wanted && error.code() == Some(ErrorCode::ImageNotFound)
}

impl Create {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let (json, wait, policy) = (self.json, !self.no_wait, self.pull);
        let request = self.request();
        // What is missing is pulled before, so that one sees how far it is.
        let named = request.image.as_deref().filter(|image| *image != DEFAULT_IMAGE);
        if let Some(image) = named.filter(|_| policy != Some(PullPolicy::Never)) {
            image::pull::ensure(client, image, policy).await?;
        }
        let status = match create(client, &request, wait).await {
            // Somebody's first sandbox: the default image is made when it is first needed.
            Err(error) if lacks_base(&error, &request) => {
                output::note("the default image is made first; this is done once");
                image::base::ensure(client).await?;
                create(client, &request, wait).await?
            }
            created => created?,
        };
        output::show_line(json, &status, sandboxes::title(&status))?;
        Ok(ExitCode::SUCCESS)
    }

    fn request(self) -> CreateSandbox {
        CreateSandbox {
            name: self.name,
            // It was pulled before, if it had to be.
            pull: self.image.as_ref().map(|_| PullPolicy::Never),
            image: self.image,
            snapshot: self.snapshot,
            engine: self.engine,
            cpus: self.resources.cpus,
            memory_mib: self.resources.memory,
            disk_mib: self.resources.disk,
            pids: None,
            env: self.env.into_iter().collect(),
            labels: self.label.into_iter().collect(),
            network: self.reach.network(),
            lifetime: self.lifetime.over(Lifetime::default()),
            standby: self.standby.standby(),
            entrypoint: self.entrypoint,
            secrets: self.secret,
            ports: self.ports.access(),
            pool: self.pool,
            mounts: self.volumes,
            queue_ms: self.queue.map(units::millis),
        }
    }
}
