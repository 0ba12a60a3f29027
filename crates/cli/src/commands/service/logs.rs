//! `torpor service logs`

use clap::Args;
use http::Method;
use torpor_client::{Client, Route, body};
use torpor_protocol::Name;
use torpor_protocol::api::OutputStream;
use torpor_protocol::hosting::{ServiceLog, ServiceLogEntry};
use torpor_protocol::page::PAGE_MAX;

use super::of;
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Characters of an instance's id that tell it from others.
const ID_SHOWN: usize = 6;

/// Show what the instances of a service said, told apart. Wakes nobody.
#[derive(Debug, Args)]
pub(super) struct Logs {
    name: Name,
    /// Only of this revision.
    #[arg(long, value_name = "N")]
    revision: Option<u32>,
    /// Only the newest so many lines.
    #[arg(
        short = 'n', long, value_name = "N",
        value_parser = clap::value_parser!(u64).range(1..=PAGE_MAX as u64)
    )]
    lines: Option<u64>,
    /// Only lines with this text in them.
    #[arg(long, value_name = "TEXT")]
    grep: Option<String>,
    /// Go on with what is said from now on, until the service ends.
    #[arg(short, long)]
    follow: bool,
    /// As JSON; with --follow, one line a line.
    #[arg(long)]
    json: bool,
}

impl Logs {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        if self.follow {
            return self.follow(client).await;
        }
        let log: ServiceLog = match self.lines {
            Some(_) => client.get(&self.route()).await?,
            None => client.list(&self.route()).await?,
        };
        output::show(self.json, &log, || log.lines.iter().map(show).collect::<String>())
    }

    async fn follow(&self, client: &Client) -> Result<()> {
        let route = self.route().query("follow", "true");
        let mut lines = client.lines::<ServiceLogEntry>(Method::GET, &route, body::empty()).await?;
        while let Some(line) = lines.next().await? {
            match self.json {
                true => output::line(&output::compact(&line)?)?,
                false => output::print(&show(&line))?,
            }
        }
        Ok(())
    }

    fn route(&self) -> Route {
        let mut route = of(&self.name).then("/logs");
        if let Some(revision) = self.revision {
            route = route.query("revision", &revision.to_string());
        }
        if let Some(lines) = self.lines {
            route = route.query("limit", &lines.to_string()).query("newest", "true");
        }
        if let Some(text) = &self.grep {
            route = route.query("contains", text);
        }
        route
    }
}

/// When, which instance of which revision, and what; a line can't look like another one.
fn show(entry: &ServiceLogEntry) -> String {
    let stream = match entry.line.stream {
        OutputStream::Stdout => "",
        OutputStream::Stderr => " err",
    };
    let when = units::show_stamp(entry.line.at_us);
    let instance: String = entry.instance.as_str().chars().take(ID_SHOWN).collect();
    let columns: Vec<String> = entry.line.text.split('\t').map(plain).collect();
    format!("{when} {}/{instance}{stream}: {}\n", entry.revision, columns.join("\t"))
}
