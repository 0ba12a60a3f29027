//! `torpor jail`: what starts the QEMU of a microVM without rights; nobody types it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::error::{Error, Result};

/// Start a QEMU in its jail and end. Started by the keeper.
#[derive(Debug, Args)]
pub(super) struct Jail {
    /// What is to be started, and what it sees.
    description: PathBuf,
}

impl Jail {
    /// Single-threaded, as only such a process can leave its namespaces.
    pub(super) fn run(self) -> Result<ExitCode> {
        torpor_engines::jail(&self.description)
            .map_err(|error| Error::local("the jail could not be built", error))?;
        Ok(ExitCode::SUCCESS)
    }
}
