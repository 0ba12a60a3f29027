//! A daemon on a free port, and `torpor` to talk to it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::process::Command;
use tokio::runtime::Runtime;
use torpor_daemon::Config;
use torpor_testdaemon::{Daemon, Setup};
use torpor_web::dialect::Dialect;

pub(crate) use crate::torpor::{Done, PATIENCE, bare, finish, until};

fn dialects() -> Vec<Arc<dyn Dialect>> {
    vec![Arc::new(torpor_mcp::Mcp)]
}

pub(crate) struct World {
    pub address: SocketAddr,
    /// "Inside" is the host: tests keep what is inside and what is here apart by themselves.
    pub inside: PathBuf,
    pub here: PathBuf,
    daemon: Option<Daemon>,
    runtime: Option<Runtime>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(Config::default())
    }

    /// A host that has room for so many sandboxes.
    pub(crate) fn of_size(sandboxes: usize) -> Self {
        let mut config = Config::default();
        config.limits.sandboxes = sandboxes;
        Self::with(config)
    }

    pub(crate) fn with(config: Config) -> Self {
        let runtime = Runtime::new().unwrap();
        let daemon =
            runtime.block_on(Daemon::start(Setup { config, dialects, ..Setup::default() }));
        let (inside, here) = (daemon.make_dir("inside"), daemon.make_dir("here"));
        let address = daemon.address;
        Self { address, inside, here, daemon: Some(daemon), runtime: Some(runtime) }
    }

    /// A world with one sandbox called `web`.
    pub(crate) fn with_sandbox() -> Self {
        let world = Self::new();
        assert_eq!(world.torpor(["create", "--name", "web"]).ok(), "web\n");
        world
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    pub(crate) fn torpor<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Done {
        self.torpor_with(args, b"")
    }

    /// With something at its standard input.
    pub(crate) fn torpor_with<'a>(
        &self,
        args: impl IntoIterator<Item = &'a str>,
        stdin: &[u8],
    ) -> Done {
        let command = self.command(args);
        self.runtime().block_on(finish(command, stdin))
    }

    /// Runs a shell script in `web`.
    pub(crate) fn sh(&self, script: &str) -> Done {
        self.torpor(["run", "web", "--", "sh", "-c", script])
    }

    /// A `torpor` that knows this daemon and nothing else of ours.
    pub(crate) fn command<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = bare(args);
        command.env("TORPOR_SERVER", format!("http://{}", self.address));
        command.current_dir(&self.here);
        command
    }

    /// `web:` and a path in the directory of what is inside.
    pub(crate) fn web(&self, name: &str) -> String {
        format!("web:{}", self.inside.join(name).display())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
        // Its directory last: nothing writes to it any more.
        drop(self.daemon.take());
    }
}
