//! What `serve`, `doctor` and `purge` share: which installation on this computer is meant.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rustix::fs::Mode;
use torpor_daemon::config::{EngineKind, Overrides};
use torpor_daemon::{Config, ServeError};

use crate::error::{Error, Result};

/// Where an installation is.
#[derive(Debug, Args)]
pub(super) struct HostArgs {
    /// Configuration file [default: /etc/torpor/torpor.toml, if it is there].
    #[arg(long, env = "TORPOR_CONFIG", value_name = "FILE", hide_env_values = true)]
    config: Option<PathBuf>,
    /// Directory for images, the ledger and disks [default: /var/lib/torpor].
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Directory for sockets and state of running machines [default: /run/torpor].
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Isolation engine [default: auto].
    #[arg(long)]
    engine: Option<Engine>,
    /// The runsc program [default: the first one in PATH].
    #[arg(long, value_name = "FILE")]
    runsc: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Engine {
    /// The best one that works on this host.
    Auto,
    Gvisor,
    /// A kernel of its own for each sandbox; needs KVM.
    Microvm,
}

impl HostArgs {
    /// The configuration file that was named.
    pub(super) fn file(&self) -> Option<PathBuf> {
        self.config.clone()
    }

    /// The configuration; `more` adds what only one verb knows.
    pub(super) fn load(self, more: impl FnOnce(&mut Overrides)) -> Result<Config> {
        let mut overrides = Overrides {
            data_dir: self.data_dir.map(absolute).transpose()?,
            runtime_dir: self.runtime_dir.map(absolute).transpose()?,
            engine: self.engine.map(|engine| match engine {
                Engine::Auto => EngineKind::Auto,
                Engine::Gvisor => EngineKind::Gvisor,
                Engine::Microvm => EngineKind::Microvm,
            }),
            runsc_path: self.runsc,
            ..Overrides::default()
        };
        more(&mut overrides);
        let config = Config::load(self.config.as_deref(), overrides)
            .map_err(|error| Error::Usage { message: error.to_string(), hint: None })?;
        settle();
        Ok(config)
    }
}

/// Makes this process one that may start others and leave files behind, whoever started it: our secrets,
/// which were read, are not in the environment that programs inherit; and others may read what must be
/// read, and write nothing. To be called before there is a second thread.
pub(super) fn settle() {
    for name in Config::secret_variables() {
        #[expect(unsafe_code, reason = "the environment is shared by all threads")]
        // SAFETY: this is the only thread.
        unsafe {
            std::env::remove_var(name);
        }
    }
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
}

/// Runs something of the daemon's libraries to its end.
pub(super) fn block_on<T>(work: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::local("start", error))?;
    Ok(runtime.block_on(Box::pin(work)))
}

/// The keeper and the machines live elsewhere than the shell that said it.
fn absolute(path: PathBuf) -> Result<PathBuf> {
    std::path::absolute(&path)
        .map_err(|error| Error::local(format!("can't find {}", path.display()), error))
}

/// Why the daemon does not do it, with everything below it and what to do.
pub(super) fn failed(error: &ServeError) -> Error {
    let hint = error.hint().map(str::to_owned);
    Error::Failed { message: chain(error), hint }
}

pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut causes = Vec::new();
    let mut inner = error.source();
    while let Some(source) = inner {
        causes.push(source.to_string());
        inner = source.source();
    }
    match &causes[..] {
        [] => error.to_string(),
        causes => format!("{error}: {}", causes.join(": ")),
    }
}
