//! `torpor kill`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use http::Method;
use torpor_client::{Client, Route};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::SendSignal;

use crate::error::Result;
use crate::output::plain;
use crate::progress::Progress;
use crate::units;
use crate::units::millis;

/// End a process and everything it started, or send it a signal.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor kill web 12\n  torpor kill web app -s HUP\n  \
    torpor kill web app --grace 10s")]
pub(super) struct Kill {
    /// Name or id.
    sandbox: SandboxRef,
    /// Process id, or the name of a supervised process.
    #[arg(value_name = "PID")]
    process: String,
    /// Send this signal instead, by name or number; a supervised process may start again.
    #[arg(short, long, value_parser = parse_signal)]
    signal: Option<i32>,
    /// Ask it to end (TERM), and wait so long before it is killed.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration, conflicts_with = "signal")]
    grace: Option<Duration>,
}

impl Kill {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::sandbox(&self.sandbox).then("/processes").part(&self.process);
        match self.signal {
            Some(signal) => {
                let body = SendSignal { signal };
                client.command(Method::POST, &route.then("/signal"), &body).await?;
            }
            None => {
                let _progress = Progress::waiting(format!("{} is to end", plain(&self.process)));
                let route = match self.grace {
                    Some(grace) => route.query("grace_ms", &millis(grace).to_string()),
                    None => route,
                };
                client.delete(&route).await?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Signals by their numbers on Linux.
const SIGNALS: [(&str, i32); 20] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("TRAP", 5),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("WINCH", 28),
    ("IO", 29),
];

fn parse_signal(text: &str) -> Result<i32, String> {
    if let Ok(number @ 1..=64) = text.parse::<i32>() {
        return Ok(number);
    }
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    let found = SIGNALS.iter().find(|(known, _)| *known == name);
    found
        .map(|(_, number)| *number)
        .ok_or_else(|| "a signal is a number from 1 to 64 or a name such as TERM".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_go_by_name_or_number() {
        for (text, number) in [("9", 9), ("TERM", 15), ("SIGHUP", 1), ("sigusr1", 10)] {
            assert_eq!(parse_signal(text), Ok(number), "{text}");
        }
        for text in ["", "0", "65", "-1", "NOPE", "SIG"] {
            assert!(parse_signal(text).is_err(), "{text:?} was accepted");
        }
    }
}
