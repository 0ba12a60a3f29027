//! `torpor update`

use std::process::ExitCode;

use clap::Args;
use torpor_protocol::api::{Standby, UpdateSandbox};
use torpor_protocol::{ErrorCode, Name, SandboxRef, Status};

use super::policy::{LifetimeArgs, ResizeArgs, StandbyArgs};
use super::reach::{PortChanges, ReachChanges};
use super::{parse_pair, sandboxes};
use crate::client::{Client, Route};
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
    resources: ResizeArgs,
    #[command(flatten)]
    reach: ReachChanges,
    #[command(flatten)]
    ports: PortChanges,
    #[command(flatten)]
    standby: StandbyArgs,
    /// Requests wake it again.
    #[arg(long, conflicts_with = "no_auto_wake")]
    auto_wake: bool,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    /// It never ends by itself any more.
    #[arg(long, conflicts_with_all = ["max_age", "expire_idle", "expire_at"])]
    no_expiry: bool,
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
        let changed: Result<Status> = client.patch(&route, &request).await;
        let status = changed.map_err(|error| asleep(error, sandboxes::title(&status)))?;
        match json {
            true => output::json(&status)?,
            false => output::line(sandboxes::title(&status))?,
        }
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
        let lifetime = match (self.no_expiry, self.lifetime.are_given()) {
            (true, _) => Some(Default::default()),
            (false, true) => Some(self.lifetime.over(spec.lifetime)),
            (false, false) => None,
        };
        let given = self.standby.are_given() || self.auto_wake;
        let standby = given.then(|| {
            let standby = self.standby.instead_of(&spec.standby);
            Standby { auto_wake: standby.auto_wake.or(self.auto_wake.then_some(true)), ..standby }
        });
        Ok(UpdateSandbox {
            name: self.name,
            labels,
            lifetime,
            standby,
            network: self.reach.over(&spec.network),
            ports: self.ports.over(spec.ports.as_ref())?,
            resources: self.resources.resize(),
        })
    }
}

/// Requests do not wake it for this, whatever it is told about them.
fn asleep(error: Error, title: &str) -> Error {
    if error.code() != Some(ErrorCode::SandboxAsleep) {
        return error;
    }
    let hint = Some(format!("wake it first: torpor wake {title}"));
    Error::Failed { message: error.to_string(), hint }
}
