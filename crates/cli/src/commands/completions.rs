//! `torpor completions`

use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use super::Cli;
use crate::error::Result;
use crate::output;

/// Print shell completions.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor completions bash > /etc/bash_completion.d/torpor\n  \
    torpor completions fish > ~/.config/fish/completions/torpor.fish")]
pub(super) struct Completions {
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self) -> Result<ExitCode> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::definition(), "torpor", &mut script);
        output::print(&String::from_utf8_lossy(&script))?;
        Ok(ExitCode::SUCCESS)
    }
}
