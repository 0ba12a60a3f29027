//! `torpor log`

use std::process::ExitCode;

use clap::Args;
use torpor_protocol::SandboxRef;
use torpor_protocol::api::Log as Page;
use torpor_protocol::guest::LogLine;

use crate::client::{Client, Route};
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Most lines of one answer of the daemon.
const PAGE_MAX: u64 = 10_000;

/// Show what all processes of a sandbox said, in the order they said it. Wakes nobody.
///
/// The newest lines of each sandbox are kept on the host, also while it sleeps, and for a while
/// after it is gone; then it is named by its id. Terminals are not in it. `torpor logs` shows the
/// output of single processes to the byte, and follows it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor log web -n 20\n  \
    torpor log web --grep timeout --stderr\n  torpor log web --json | jq -r '.lines[].text'")]
pub(super) struct Log {
    /// Name or id; of one that is gone, its id.
    sandbox: SandboxRef,
    /// Only the newest so many lines.
    #[arg(
        short = 'n', long, value_name = "N",
        value_parser = clap::value_parser!(u64).range(1..=PAGE_MAX)
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
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Log {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if self.json {
            let mut lines = Vec::new();
            self.each_page(client, |page| {
                lines.extend(page);
                Ok(())
            })
            .await?;
            output::json(&Page { lines, next: None })?;
        } else {
            self.each_page(client, |page| {
                let shown: Vec<String> = page.iter().map(show).collect();
                output::print(&shown.concat())
            })
            .await?;
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn each_page(
        &self,
        client: &Client,
        mut take: impl FnMut(Vec<LogLine>) -> Result<()>,
    ) -> Result<()> {
        let mut after: Option<u64> = None;
        loop {
            let page: Page = client.get(&self.route(after)).await?;
            take(page.lines)?;
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(()),
            }
        }
    }

    fn route(&self, after: Option<u64>) -> Route {
        let mut route = Route::sandbox(&self.sandbox).then("/log");
        let limit = self.lines.unwrap_or(PAGE_MAX).to_string();
        route = route.query("limit", &limit);
        if self.lines.is_some() {
            route = route.query("newest", "true");
        }
        if let Some(text) = &self.grep {
            route = route.query("contains", text);
        }
        for (given, stream) in [(self.stderr, "stderr"), (self.stdout, "stdout")] {
            if given {
                route = route.query("stream", stream);
            }
        }
        match after {
            Some(after) => route.query("after", &after.to_string()),
            None => route,
        }
    }
}

/// When, who, and what; a line can't look like another one.
fn show(line: &LogLine) -> String {
    let who = line.name.as_deref().unwrap_or(&line.command);
    let stream = if line.stderr { " err" } else { "" };
    let when = units::show_stamp(line.stamp_us);
    let columns: Vec<String> = line.text.split('\t').map(plain).collect();
    format!("{when} {}[{}]{stream}: {}\n", plain(who), line.pid, columns.join("\t"))
}
