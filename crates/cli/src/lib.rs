//! The command line of Torpor: a client of the public HTTP API, plus the verbs that make this
//! computer a host (`serve`, `doctor`, `kernel`, `purge`).
//!
//! ```text
//!   main ─▶ commands (one file a verb) ─▶ torpor_client ─▶ daemon
//!                ├─▶ session, terminal     a process inside at our standard input and output
//!                ├─▶ archive               tars: packed, and unpacked without trust
//!                └─▶ output, units, progress
//! ```
//!
//! Invariants
//! - errors are rendered here and nowhere else;
//! - standard output carries results only; everything about us goes to standard error.

mod archive;
mod commands;
mod error;
mod output;
mod progress;
mod reference;
mod session;
mod signals;
mod similar;
mod terminal;
mod units;

use std::io::Write;
use std::process::ExitCode;

#[cfg(any(test, fuzzing))]
pub use archive::fuzzing;
pub use reference::markdown;

/// Parses the command line, does what it says and returns what to exit with.
pub fn main() -> ExitCode {
    let cli = match commands::Cli::parse_arguments(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" of clap too; it knows where they go.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(error::EXIT_USAGE));
        }
    };
    let verbose = cli.verbose;
    match cli.run() {
        Ok(code) => code,
        Err(error) => {
            let _ = std::io::stderr().write_all(error.render(verbose).as_bytes());
            error.exit_code()
        }
    }
}
