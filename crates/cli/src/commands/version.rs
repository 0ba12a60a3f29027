//! `torpor version`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use torpor_client::{Client, Route};
use torpor_protocol::api::Info;

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Show the versions of this program and of the daemon.
#[derive(Debug, Args)]
pub(super) struct Version {
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Versions {
    client: &'static str,
    /// None: it can't be reached.
    server: Option<Info>,
}

impl Version {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let server = match client.get::<Info>(&Route::new("/v1/info")).await {
            Ok(info) => Some(info),
            Err(torpor_client::Error::Unreachable { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let versions = Versions { client: env!("CARGO_PKG_VERSION"), server };
        if self.json {
            output::json(&versions)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut fields = vec![("client", versions.client.to_owned())];
        match &versions.server {
            None => fields.push(("server", format!("not reachable at {}", client.server()))),
            Some(info) => {
                let engine = format!("{} {}", info.engine, info.engine_version);
                fields.push(("server", format!("{} at {}", plain(&info.version), client.server())));
                fields.push(("engine", plain(engine.trim_end())));
                fields.push(("sandboxes", info.sandboxes.to_string()));
                fields
                    .push(("up for", units::show_duration(Duration::from_millis(info.uptime_ms))));
            }
        }
        output::print(&output::fields(&fields))?;
        Ok(ExitCode::SUCCESS)
    }
}
