//! `torpor attach`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{ExecInput, Process};

use super::process;
use crate::error::Result;
use crate::session::{self, Input, Seat};
use crate::terminal::{self, Modes};

/// Attach to a running process: its output so far, then live.
///
/// ctrl-p ctrl-q leaves it running, and so does whatever else ends us.
#[derive(Debug, Args)]
pub(super) struct Attach {
    /// Name or id.
    sandbox: SandboxRef,
    /// Process id, or the name of a supervised process.
    #[arg(value_name = "PID")]
    process: String,
    /// Only what comes from now on.
    #[arg(long)]
    no_replay: bool,
    /// Do not pass on our standard input.
    #[arg(long)]
    no_stdin: bool,
}

impl Attach {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::sandbox(&self.sandbox).then("/processes").part(&self.process);
        let process: Process = client.get(&route).await?;
        let replay = if self.no_replay { "false" } else { "true" };
        let socket = client.socket(&route.then("/attach").query("replay", replay)).await?;
        let open = process.running && (process.terminal || process.stdin_open);
        let takes_input = open && !self.no_stdin;
        let seat = Seat {
            input: if takes_input { Input::Ours } else { Input::Untouched },
            terminal: process.terminal,
            detach_keys: terminal::stdin_is_terminal(),
            pass_signals: false,
        };
        let size = process.terminal.then(|| ExecInput::Resize(terminal::size()));
        let raw = if process.terminal && takes_input { Modes::raw()? } else { None };
        let end = session::sit(socket, size, seat).await;
        drop(raw);
        Ok(process::ended(end?, &self.sandbox, None))
    }
}
