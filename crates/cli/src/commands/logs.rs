//! `torpor logs`

use std::process::ExitCode;

use clap::Args;
use http::Method;
use torpor_client::{Client, Route, body};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{Log, LogEntry, OutputStream};
use torpor_protocol::page::PAGE_MAX;

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Show what all processes of a sandbox said, in the order they said it. Wakes nobody.
///
/// The newest lines of each sandbox are kept on the host, also while it sleeps, and for a while
/// after it is gone; then it is named by its id. Terminals are not in it. `torpor output` shows what
/// one process printed, to the byte.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor logs web -n 20 -f\n  \
    torpor logs web --grep timeout --stderr\n  torpor logs web --json | jq -r '.lines[].text'")]
pub(super) struct Logs {
    /// Name or id; of one that is gone, its id.
    sandbox: SandboxRef,
    /// Only the newest so many lines.
    #[arg(
        short = 'n', long, value_name = "N",
        value_parser = clap::value_parser!(u64).range(1..=PAGE_MAX as u64)
    )]
    lines: Option<u64>,
    /// Only lines with this text in them.
    #[arg(long, value_name = "TEXT")]
    grep: Option<String>,
    /// Only standard error.
    #[arg(long)]
    stderr: bool,
    /// Only standard output.
    #[arg(long, conflicts_with = "stderr")]
    stdout: bool,
    /// Go on with what is said from now on, until the sandbox ends.
    #[arg(short, long)]
    follow: bool,
    /// As JSON; with --follow, one line a line.
    #[arg(long)]
    json: bool,
}

impl Logs {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if self.follow {
            return self.follow(client).await;
        }
        let log: Log = match self.lines {
            Some(_) => client.get(&self.route()).await?,
            None => client.list(&self.route()).await?,
        };
        output::show(self.json, &log, || log.lines.iter().map(show).collect::<String>())?;
        Ok(ExitCode::SUCCESS)
    }

    async fn follow(&self, client: &Client) -> Result<ExitCode> {
        let route = self.route().query("follow", "true");
        let mut lines = client.lines::<LogEntry>(Method::GET, &route, body::empty()).await?;
        while let Some(line) = lines.next().await? {
            match self.json {
                true => output::line(&output::compact(&line)?)?,
                false => output::print(&show(&line))?,
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn route(&self) -> Route {
        let mut route = Route::sandbox(&self.sandbox).then("/logs");
        if let Some(lines) = self.lines {
            route = route.query("limit", &lines.to_string()).query("newest", "true");
        }
        if let Some(text) = &self.grep {
            route = route.query("contains", text);
        }
        for (given, stream) in [(self.stderr, "stderr"), (self.stdout, "stdout")] {
            if given {
                route = route.query("stream", stream);
            }
        }
        route
    }
}

/// When, who, and what; a line can't look like another one.
pub(super) fn show(line: &LogEntry) -> String {
    let who = line.name.as_deref().unwrap_or(&line.command);
    let stream = match line.stream {
        OutputStream::Stdout => "",
        OutputStream::Stderr => " err",
    };
    let when = units::show_stamp(line.at_us);
    let columns: Vec<String> = line.text.split('\t').map(plain).collect();
    format!("{when} {}[{}]{stream}: {}\n", plain(who), line.pid, columns.join("\t"))
}
