//! `torpor serve`

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use tokio::signal::unix::{Signal, SignalKind};
use torpor_daemon::config::LogFormat;
use torpor_daemon::{Config, ShutdownMode};

use super::host::{HostArgs, failed};
use crate::error::{EXIT_INTERRUPTED, Error, Result};
use crate::output;
use crate::signals::listen;

/// Run the daemon on this host.
///
/// SIGTERM or ctrl-c stop it when every sandbox is saved; the next daemon wakes those that ran. A
/// second one does not wait: what is not saved goes on without the daemon, and is found again. So do
/// all after SIGUSR1, which is for upgrades.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor serve\n  \
    TORPOR_API_KEY=… torpor serve --listen 0.0.0.0:8900 --data-dir /srv/torpor")]
pub(super) struct Serve {
    /// Address and port [default: 127.0.0.1:8900].
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    host: HostArgs,
    /// What to log: error, warn, info, debug, trace, or a filter [default: info].
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// How to log [default: text].
    #[arg(long)]
    log_format: Option<Format>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl Serve {
    pub(super) fn run(self) -> Result<ExitCode> {
        let Self { listen, host, log_level, log_format } = self;
        let config = host.load(|overrides| {
            overrides.listen = listen;
            overrides.log_level = log_level;
            overrides.log_format = log_format.map(|format| match format {
                Format::Text => LogFormat::Text,
                Format::Json => LogFormat::Json,
            });
        })?;
        torpor_daemon::telemetry::start(&config.log)
            .map_err(|error| Error::usage(format!("the log level is no filter: {error}")))?;
        torpor_daemon::cores::forbid();
        for name in Config::unknown_variables() {
            output::note(&format!("torpor: warning: {name} is set and means nothing to us"));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::local("start", error))?;
        let result = runtime.block_on(Box::pin(serve(config)));
        // What could end well has ended.
        runtime.shutdown_background();
        result
    }
}

async fn serve(config: Config) -> Result<ExitCode> {
    let mut signals = Signals {
        interrupt: listen(SignalKind::interrupt())?,
        terminate: listen(SignalKind::terminate())?,
        hand_over: listen(SignalKind::user_defined1())?,
    };
    let listener = torpor_daemon::bind(&config).await.map_err(|error| failed(&error))?;
    let address = listener.local_addr().map_err(|error| Error::local("listen", error))?;
    output::line(&format!("torpor listens on http://{address}"))?;
    let mut dialects = torpor_dialects::all();
    dialects.push(Arc::new(torpor_mcp::Mcp));
    let (stop, shutdown) = tokio::sync::oneshot::channel();
    let impatient = async {
        let mode = signals.next().await;
        output::note(match mode {
            ShutdownMode::Durable => "torpor: stopping; sandboxes are being saved",
            ShutdownMode::Running => "torpor: stopping; sandboxes go on",
        });
        let _ = stop.send(mode);
        // What is not saved yet goes on, as if the daemon had been killed.
        signals.next().await;
    };
    tokio::select! {
        served = torpor_daemon::serve(config, dialects, listener, shutdown) => {
            served.map(|()| ExitCode::SUCCESS).map_err(|error| failed(&error))
        }
        () = impatient => Err(Error::Exit(EXIT_INTERRUPTED)),
    }
}

/// What can tell us to stop.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hand_over: Signal,
}

impl Signals {
    async fn next(&mut self) -> ShutdownMode {
        tokio::select! {
            _ = self.interrupt.recv() => ShutdownMode::Durable,
            _ = self.terminate.recv() => ShutdownMode::Durable,
            _ = self.hand_over.recv() => ShutdownMode::Running,
        }
    }
}
