//! `torpor enter`: what starts runsc where its sandbox has a user of its own; nobody types it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::error::{Error, Result};

/// Run runsc in a namespace of users. Started by the keeper.
#[derive(Debug, Args)]
pub(super) struct Enter {
    /// What is to be run, and for which user.
    description: PathBuf,
}

impl Enter {
    pub(super) fn run(self) -> Result<ExitCode> {
        let code = torpor_engines::gvisor::enter(&self.description)
            .map_err(|error| Error::local("runsc could not be started", error))?;
        Ok(ExitCode::from(code))
    }
}
