//! `torpor exec`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{Command, ExecInput};

use super::process::{self, ProcessArgs};
use crate::error::Result;
use crate::session::{self, Input, Seat};
use crate::terminal::{self, Modes};

/// Run a command in a sandbox, optionally with a terminal.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor exec -it web bash\n  \
    torpor exec -itd web vim notes.md      ctrl-p ctrl-q leaves it, torpor attach returns")]
pub(super) struct Exec {
    /// Pass on our standard input.
    #[arg(short, long)]
    interactive: bool,
    /// Give it a terminal.
    #[arg(short, long)]
    tty: bool,
    /// Keep it running when we go; ctrl-p ctrl-q goes.
    #[arg(short, long)]
    detachable: bool,
    #[command(flatten)]
    process: ProcessArgs,
    /// Name or id.
    sandbox: SandboxRef,
    /// Program and arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Exec {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let mut command = Command {
            terminal: self.tty.then(terminal::size),
            detachable: self.detachable,
            ..self.process.command(self.command)
        };
        if let (true, Ok(kind)) = (self.tty, std::env::var("TERM")) {
            command.env.entry("TERM".to_owned()).or_insert(kind);
        }
        let socket = client.socket(&Route::sandbox(&self.sandbox).then("/exec")).await?;
        let seat = Seat {
            input: if self.interactive { Input::Ours } else { Input::Nothing },
            terminal: self.tty,
            detach_keys: self.detachable && self.interactive && terminal::stdin_is_terminal(),
            // With a terminal ctrl-c is a key, and whoever signals us means us.
            pass_signals: !self.tty,
        };
        let start = Some(ExecInput::Start(Box::new(command)));
        let raw = if self.tty && self.interactive { Modes::raw()? } else { None };
        let end = session::sit(socket, start, seat).await;
        // Before anything is said.
        drop(raw);
        match end {
            Ok(end) => Ok(process::ended(end, &self.sandbox, None)),
            Err(error) => process::cannot_start(error),
        }
    }
}
