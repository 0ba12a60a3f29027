//! `torpor update`

use std::process::ExitCode;

use clap::Args;
use torpor_protocol::api::{Standby, UpdateSandbox};
use torpor_protocol::{SandboxRef, Status};

use super::policy::{LifetimeArgs, StandbyArgs};
use super::{parse_pair, sandboxes};
use crate::client::{Client, Route};
use crate::error::{Error, Result};
use crate::output;

/// Change when a sandbox sleeps and ends, and its labels; it does not wake for that.
///
/// What is not mentioned stays as it is.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor update web --idle-after 5m --expire-idle 30d\n  \
    torpor update web --auto-wake --label team=b")]
pub(super) struct Update {
    /// Name or id.
    sandbox: SandboxRef,
    /// Label to add or change.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
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
        let request = self.request(&status);
        if request == UpdateSandbox::default() {
            return Err(Error::usage("nothing is to be changed"));
        }
        let status: Status = client.patch(&route, &request).await?;
        match json {
            true => output::json(&status)?,
            false => output::line(sandboxes::title(&status))?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The API replaces labels and lifetime as a whole, so what is there goes along.
    fn request(self, status: &Status) -> UpdateSandbox {
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
        UpdateSandbox { labels, lifetime, standby }
    }
}
