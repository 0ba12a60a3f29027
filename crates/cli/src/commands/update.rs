//! `torpor update`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::UpdateSandbox;
use torpor_protocol::{ErrorCode, Name, SandboxRef, Status};

use super::policy::{PolicyChanges, ResourceArgs};
use super::reach::{PortChanges, ReachChanges};
use super::{parse_pair, sandboxes};
use crate::error::{Error, Result};
use crate::output;

/// Change a sandbox: name, resources, network, ports, standby and lifetime.
///
/// What is not mentioned stays as it is. It happens at once and the sandbox does not wake for it; only
/// what it may use can't be changed while it sleeps on disk.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor update web --idle-after 5m --expire-idle 30d\n  \
    torpor update web --auto-wake --label team=b\n  \
    torpor update web --name shop --memory 4g\n  \
    torpor update web --internet off --expose 8080 --public\n  \
    torpor update web --allow api.example.com --bandwidth 10mb/s --connections 100")]
pub(super) struct Update {
    /// Name or id.
    sandbox: SandboxRef,
    /// Another name for it; it must be free.
    #[arg(long)]
    name: Option<Name>,
    /// Label to add or change.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    #[command(flatten)]
    resources: ResourceArgs,
    #[command(flatten)]
    reach: ReachChanges,
    #[command(flatten)]
    ports: PortChanges,
    #[command(flatten)]
    policy: PolicyChanges,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Update {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::sandbox(&self.sandbox);
        let json = self.json;
        let status: Status = client.get(&route).await?;
        let request = self.request(&status)?;
        if request == UpdateSandbox::default() {
            return Err(Error::usage("nothing is to be changed"));
        }
        let changed = client.patch(&route, &request).await;
        let status: Status = changed.map_err(|error| asleep(error, sandboxes::title(&status)))?;
        output::show_line(json, &status, sandboxes::title(&status))?;
        Ok(ExitCode::SUCCESS)
    }

    /// The API replaces labels and lifetime as a whole, so what is there goes along.
    fn request(self, status: &Status) -> Result<UpdateSandbox> {
        let spec = &status.spec;
        let labels = (!self.label.is_empty()).then(|| {
            let mut labels = spec.labels.clone();
            labels.extend(self.label);
            labels
        });
        Ok(UpdateSandbox {
            name: self.name,
            labels,
            lifetime: self.policy.lifetime(spec.lifetime),
            standby: self.policy.standby(&spec.standby),
            network: self.reach.over(&spec.network),
            ports: self.ports.over(spec.ports.as_ref())?,
            resources: self.resources.resize(),
        })
    }
}

/// Requests do not wake it for this, whatever it is told about them.
fn asleep(error: torpor_client::Error, title: &str) -> Error {
    if error.code() != Some(ErrorCode::SandboxAsleep) {
        return error.into();
    }
    let hint = Some(format!("wake it first: torpor wake {title}"));
    Error::Failed { message: error.to_string(), hint }
}
