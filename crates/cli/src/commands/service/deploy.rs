//! `torpor service deploy`

use std::num::NonZeroU16;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use torpor_client::Client;
use torpor_protocol::hosting::{
    Deploy as Wish, DeployService, Health, HostedService, Revision, RevisionState, ScaleChange,
    Sticky,
};
use torpor_protocol::preview::{CreatePreviewToken, PreviewLabel, PreviewToken, PreviewTokenList};
use torpor_protocol::{Name, SecretName};

use super::{route, source};
use crate::commands::parse_env;
use crate::commands::policy::{Idle, ResourceArgs, parse_idle};
use crate::commands::reach::ReachArgs;
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::progress::Progress;
use crate::units;

/// How often it is asked how a deploy stands.
const LOOK: Duration = Duration::from_millis(200);

/// Deploy a directory or an image as a service, or as another revision of one, and print its address.
///
/// A directory is built by its Dockerfile; without one it is a Node program (package.json), a Python program
/// (main.py, app.py or server.py, with requirements.txt or pyproject.toml), or static files (index.html). The program
/// gets the variable PORT. Traffic switches when the revision is healthy; if it never is, nothing changes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor service deploy ./api --name api --public\n  \
    torpor service deploy . --name api --health /healthz --min 1 --max 10\n  \
    torpor service deploy ghcr.io/acme/api:2 --name api --port 8080 --no-traffic --tag next")]
pub(super) struct Deploy {
    /// A directory, or the name or id of an image.
    source: String,
    /// What the service is called.
    #[arg(long)]
    name: Name,
    /// Where its program listens inside [default: what the image exposes].
    #[arg(long)]
    port: Option<NonZeroU16>,
    /// So many instances never sleep [new services: 0].
    #[arg(long, value_name = "N")]
    min: Option<u32>,
    /// Never more instances than this [new services: 5].
    #[arg(long, value_name = "N")]
    max: Option<u32>,
    /// Requests that one instance has at the same time [new services: 80].
    #[arg(long, value_name = "N")]
    concurrency: Option<u32>,
    /// An instance sleeps when it had no request for so long, or `never`.
    #[arg(long, value_name = "DURATION", value_parser = parse_idle)]
    idle_after: Option<Idle>,
    /// A variable of its program; KEY alone passes on our own. May be given several times.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// A secret that its program gets as a variable; may be given several times.
    #[arg(long, value_name = "NAME")]
    secret: Vec<SecretName>,
    /// It is healthy when GET of this path is answered with less than 400 [default: when it listens].
    #[arg(long, value_name = "PATH")]
    health: Option<String>,
    /// So long an instance may take to be healthy.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration, default_value = "60s")]
    health_timeout: Duration,
    /// Everybody may come.
    #[arg(long, conflicts_with = "private")]
    public: bool,
    /// Who comes needs a token or an API key; so it is for new services.
    #[arg(long)]
    private: bool,
    /// What its host names begin with, for ever.
    #[arg(long)]
    prefix: Option<PreviewLabel>,
    /// Leave the traffic where it is.
    #[arg(long)]
    no_traffic: bool,
    /// Give the revision an address of its own, under this name.
    #[arg(long)]
    tag: Option<Name>,
    /// Start every instance anew, instead of from a memory snapshot of the first healthy one.
    #[arg(long)]
    no_snapshot: bool,
    /// While several revisions have traffic, the same value of this header leads to the same one.
    #[arg(long, value_name = "NAME", conflicts_with = "sticky_cookie")]
    sticky_header: Option<String>,
    /// The same with a cookie.
    #[arg(long, value_name = "NAME")]
    sticky_cookie: Option<String>,
    /// What isolates its instances: gvisor, microvm, or auto, the daemon's default.
    #[arg(long, value_name = "KIND")]
    engine: Option<String>,
    #[command(flatten)]
    resources: ResourceArgs,
    #[command(flatten)]
    reach: ReachArgs,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
    /// Program and arguments [default: what the image says].
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Deploy {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let (name, json) = (self.name.clone(), self.json);
        let directory = Path::new(&self.source);
        let image = if directory.is_dir() {
            source::build(client, directory, &name).await?.id.to_string()
        } else if self.source.starts_with(['.', '/']) {
            return Err(Error::failed(format!("there is no directory {}", plain(&self.source))));
        } else {
            self.source.clone()
        };
        let request = self.request(image);
        let progress = Progress::waiting("recording the deploy");
        let begun: HostedService = client.post(&route(), &request).await?;
        let number = begun.revisions.first().map_or(1, |revision| revision.number);
        let service = settled(client, &name, number, progress).await?;
        if json {
            return output::json(&service);
        }
        let address = address(client, &service).await?;
        output::line(&plain(&address))
    }

    fn request(self, image: String) -> DeployService {
        let header = self.sticky_header.map(Sticky::Header);
        let public = (self.public || self.private).then_some(self.public);
        DeployService {
            name: self.name,
            public,
            prefix: self.prefix,
            scale: ScaleChange {
                min: self.min,
                max: self.max,
                concurrency: self.concurrency,
                idle_after_ms: self.idle_after.map(Idle::millis),
            },
            sticky: header.or(self.sticky_cookie.map(Sticky::Cookie)),
            revision: Wish {
                image: Some(image),
                command: self.command,
                port: self.port,
                env: self.env.into_iter().collect(),
                secrets: self.secret,
                health: Health {
                    path: self.health,
                    timeout_ms: units::millis(self.health_timeout),
                },
                cpus: self.resources.cpus,
                memory_mib: self.resources.memory,
                disk_mib: self.resources.disk,
                network: self.reach.network(),
                engine: self.engine,
                no_snapshot: self.no_snapshot,
                no_traffic: self.no_traffic,
                tag: self.tag,
                ..Wish::default()
            },
        }
    }
}

/// The service when the deploy is over and well.
async fn settled(
    client: &Client,
    name: &Name,
    number: u32,
    progress: Progress,
) -> Result<HostedService> {
    loop {
        let service: HostedService = client.get(&route().part(name.as_str())).await?;
        let Some(revision) = service.revisions.iter().find(|it| it.number == number) else {
            return Err(Error::failed(format!("revision {number} was removed")));
        };
        let step = match revision.state {
            RevisionState::Starting => "starting the first instance",
            RevisionState::Checking => "waiting until it is healthy",
            RevisionState::Saving => "taking a memory snapshot of it",
            RevisionState::Ready => return Ok(service),
            RevisionState::Failed => {
                drop(progress);
                return Err(failed(name, revision, !service.traffic.is_empty()));
            }
        };
        progress.say(format!("revision {number}: {step}"));
        tokio::time::sleep(LOOK).await;
    }
}

fn failed(name: &Name, revision: &Revision, others: bool) -> Error {
    for line in &revision.log {
        output::note(&format!("  {}", plain(line)));
    }
    let why = revision.message.as_deref().map(plain).unwrap_or_default();
    let rest = if others { "the traffic is as it was; " } else { "" };
    Error::Failed {
        message: format!("revision {} of {name} failed: {why}", revision.number),
        hint: Some(format!("{rest}torpor service logs {name} --revision {}", revision.number)),
    }
}

/// Where it is found; of a private one that has no token with one.
async fn address(client: &Client, service: &HostedService) -> Result<String> {
    let unknown = || Error::failed("the daemon does not say where it is");
    let tokens = route().part(service.name.as_str()).then("/tokens");
    if service.public || !client.list::<PreviewTokenList>(&tokens).await?.tokens.is_empty() {
        return service.urls.first().cloned().ok_or_else(unknown);
    }
    let token: PreviewToken = client.post(&tokens, &CreatePreviewToken::default()).await?;
    output::note("keep it: its token is not shown again; with --public everybody may come");
    token.urls.first().cloned().ok_or_else(unknown)
}
