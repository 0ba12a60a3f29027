//! `torpor run`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{Command, ExecInput, Process};

use super::process::{self, ProcessArgs};
use super::supervision::SuperviseArgs;
use crate::error::Result;
use crate::session::{self, Input, Seat};
use crate::units::millis;
use crate::{output, terminal, units};

/// Run a command in a sandbox, streaming its input and output; exits with its status.
///
/// Exits with the command's code, with 128 + N if signal N ended it, with 124 if its time was up,
/// with 127 if it can't be started. Input is passed on if it is piped or redirected.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor run web -- ls -l /\n  \
    echo 'print(6*7)' | torpor run web -- python3 -\n  \
    torpor run web -d --name app --restart always -- npm start\n  \
    torpor run web -d --name api --health-http 8080:/healthz -- ./serve")]
pub(super) struct Run {
    /// Name or id.
    sandbox: SandboxRef,
    #[command(flatten)]
    process: ProcessArgs,
    /// Kill it with everything it started after so long, such as 30s.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    timeout: Option<Duration>,
    /// Leave it in the background and print its process id.
    #[arg(short, long)]
    detach: bool,
    #[command(flatten)]
    supervise: SuperviseArgs,
    /// Do not keep what it prints.
    #[arg(long, requires = "detach")]
    discard_stdout: bool,
    /// Do not keep what it prints on standard error.
    #[arg(long, requires = "detach")]
    discard_stderr: bool,
    /// Program and arguments; no shell is involved.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,
}

impl Run {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let timeout_ms = self.timeout.map(millis);
        let command = Command { timeout_ms, ..self.process.command(self.command) };
        let route = Route::sandbox(&self.sandbox);
        if self.detach {
            let command = Command {
                supervise: self.supervise.supervise(),
                discard_stdout: self.discard_stdout,
                discard_stderr: self.discard_stderr,
                ..command
            };
            let started: Process = match client.post(&route.then("/processes"), &command).await {
                Ok(started) => started,
                Err(error) => return process::cannot_start(error.into()),
            };
            output::line(&started.pid.to_string())?;
            return Ok(ExitCode::SUCCESS);
        }
        let socket = client.socket(&route.then("/exec")).await?;
        let input = if terminal::stdin_is_terminal() { Input::Nothing } else { Input::Ours };
        let seat = Seat { input, terminal: false, detach_keys: false, pass_signals: true };
        match session::sit(socket, Some(ExecInput::Start(Box::new(command))), seat).await {
            Ok(end) => Ok(process::ended(end, &self.sandbox, self.timeout)),
            Err(error) => process::cannot_start(error),
        }
    }
}
