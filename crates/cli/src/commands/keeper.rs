//! `torpor keeper`: what the daemon starts to hold its machines; nobody types it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::error::{Error, Result};

/// Hold the machines of a daemon while it is away. Started by the daemon.
#[derive(Debug, Args)]
pub(super) struct Keeper {
    /// Where to listen.
    socket: PathBuf,
}

impl Keeper {
    /// Single-threaded and without a runtime: it stays small for as long as machines live.
    pub(super) fn run(self) -> Result<ExitCode> {
        let socket = torpor_engines::keeper::listen(&self.socket).map_err(|error| {
            Error::local(format!("can't listen on {}", self.socket.display()), error)
        })?;
        torpor_engines::keeper::run(socket)
            .map_err(|error| Error::local("the keeper ended", error))?;
        Ok(ExitCode::SUCCESS)
    }
}
