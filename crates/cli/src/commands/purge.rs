//! `torpor purge`

use std::process::ExitCode;

use clap::Args;

use super::host::{HostArgs, block_on, failed};
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;
use crate::terminal;

/// End every machine of this installation and remove what they have on this computer: processes,
/// mounts, networks, cgroups, disks.
///
/// The daemon must be stopped. Images and the ledger stay; sandboxes that lose their machine are
/// shown as failed by the next daemon.
#[derive(Debug, Args)]
pub(super) struct Purge {
    #[command(flatten)]
    host: HostArgs,
    /// Do not ask.
    #[arg(short, long)]
    yes: bool,
}

impl Purge {
    pub(super) fn run(self) -> Result<ExitCode> {
        let config = self.host.load(|_| ())?;
        let shown = config.data_dir.display().to_string();
        if !config.data_dir.exists() {
            return Err(Error::failed(format!("there is no installation at {shown}")));
        }
        if !self.yes && !terminal::confirmed(&format!("end every machine of {shown}?"))? {
            return Ok(ExitCode::SUCCESS);
        }
        let removed = block_on(async {
            let _progress = Progress::waiting("ending machines");
            torpor_daemon::purge(&config).await
        })?;
        let removed = removed.map_err(|error| failed(&error))?;
        output::line(&format!("{removed} machines were removed"))?;
        Ok(ExitCode::SUCCESS)
    }
}
