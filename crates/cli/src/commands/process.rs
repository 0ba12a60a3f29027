//! What `run`, `exec` and `attach` share: arguments of a process, and what its end means for us.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use torpor_protocol::api::{Command, ExitReport};
use torpor_protocol::{ErrorCode, SandboxRef};

use super::parse_env;
use crate::error::{EXIT_CANNOT_START, EXIT_FAILED, EXIT_TIMED_OUT, Error, Result};
use crate::output;
use crate::session::End;
use crate::units;

/// How a process is to be started.
#[derive(Debug, Args)]
pub(super) struct ProcessArgs {
    /// Set an environment variable; KEY alone passes on our own.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Directory to start in [default: the image's].
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Who to be: name, uid, name:group or uid:gid [default: the image's user].
    #[arg(short, long)]
    user: Option<String>,
    /// The sandbox does not fall asleep while it runs.
    #[arg(long)]
    keep_awake: bool,
}

impl ProcessArgs {
    pub(super) fn command(self, command: Vec<String>) -> Command {
        Command {
            command,
            env: self.env.into_iter().collect(),
            cwd: self.workdir,
            user: self.user,
            keep_awake: self.keep_awake,
            ..Command::default()
        }
    }
}

/// Says what has to be said about the end of a process, and passes its code on.
pub(super) fn exit(report: ExitReport, timeout: Option<Duration>) -> ExitCode {
    if report.oom_killed {
        output::note("torpor: killed: out of memory");
    }
    if report.timed_out {
        let limit = timeout.map(|limit| format!(" after {}", units::show_duration(limit)));
        output::note(&format!("torpor: killed: time was up{}", limit.unwrap_or_default()));
    }
    ExitCode::from(exit_code(report))
}

fn exit_code(report: ExitReport) -> u8 {
    if report.timed_out {
        return EXIT_TIMED_OUT;
    }
    let code = match (report.exit_code, report.signal) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => return EXIT_FAILED,
    };
    u8::try_from(code).unwrap_or(EXIT_FAILED)
}

/// The end of a session, as our exit code.
pub(super) fn ended(end: End, sandbox: &SandboxRef, timeout: Option<Duration>) -> ExitCode {
    match end {
        End::Exited(report) => exit(report, timeout),
        End::Detached { pid } => {
            let pid = pid.map_or_else(|| "PID".to_owned(), |pid| pid.to_string());
            // The cursor may be anywhere in a line.
            output::note(&format!("\r\ndetached; come back with: torpor attach {sandbox} {pid}"));
            ExitCode::SUCCESS
        }
    }
}

/// A command that can't be started exits as a shell would; the error is still shown.
pub(super) fn cannot_start(error: Error) -> Result<ExitCode> {
    if error.code() != Some(ErrorCode::CommandFailed) {
        return Err(error);
    }
    output::note(error.render(false).trim_end());
    Ok(ExitCode::from(EXIT_CANNOT_START))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_us_as_it_ended_itself() {
        let none = ExitReport::default();
        assert_eq!(exit_code(ExitReport { exit_code: Some(3), ..none }), 3);
        assert_eq!(exit_code(ExitReport { signal: Some(9), ..none }), 137);
        assert_eq!(exit_code(ExitReport { timed_out: true, signal: Some(9), ..none }), 124);
        assert_eq!(exit_code(ExitReport { exit_code: Some(-1), ..none }), 1);
        assert_eq!(exit_code(none), 1);
    }
}
