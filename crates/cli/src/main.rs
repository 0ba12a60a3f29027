//! `torpor`: the command line, and with `torpor serve` the daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    torpor_cli::main()
}
