//! `torpor events`

use std::process::ExitCode;

use clap::Args;
use serde::Deserialize;
use torpor_client::{Client, Error, Route};
use torpor_protocol::ErrorBody;
use torpor_protocol::event::{Event, EventKind, EventList};

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Show what happened to sandboxes and other things, oldest first.
///
/// Every event has a number. Who follows and is cut off goes on with --after the last one, and misses nothing.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor events\n  torpor events --follow --type sandbox.failed\n  \
    torpor events --follow --after 4711 --json"
)]
pub(super) struct Events {
    /// Go on with what happens from now on.
    #[arg(short, long)]
    follow: bool,
    /// Only events of this type, such as sandbox.slept.
    #[arg(long = "type", visible_alias = "kind", value_name = "TYPE")]
    kind: Option<EventKind>,
    /// Only events of what has this id.
    #[arg(long, value_name = "ID")]
    subject: Option<String>,
    /// Begin after the event of this number.
    #[arg(long, value_name = "NUMBER")]
    after: Option<u64>,
    /// As JSON; with --follow, an event a line.
    #[arg(long)]
    json: bool,
}

/// What comes in a stream.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Told {
    Event(Event),
    /// The last word.
    Error(ErrorBody),
}

impl Events {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if self.follow {
            self.watch(client).await?
        } else {
            self.list(client).await?
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn list(self, client: &Client) -> Result<()> {
        let mut route = self.route("/v1/events/log");
        if let Some(after) = self.after {
            route = route.query("cursor", &after.to_string());
        }
        let list: EventList = client.list(&route).await?;
        let text = || list.events.iter().map(|event| line(event) + "\n").collect();
        output::show(self.json, &list, text)
    }

    async fn watch(self, client: &Client) -> Result<()> {
        let mut route = self.route("/v1/events/stream");
        if let Some(after) = self.after {
            route = route.query("after", &after.to_string());
        }
        let mut told = client.events(&route).await?;
        while let Some(told) = told.next().await? {
            match told {
                Told::Event(event) if self.json => output::line(&output::compact(&event)?)?,
                Told::Event(event) => output::line(&line(&event))?,
                Told::Error(body) => return Err(Error::refused(body).into()),
            }
        }
        Ok(())
    }

    fn route(&self, path: &str) -> Route {
        let mut route = Route::new(path);
        if let Some(kind) = self.kind {
            route = route.query("type", kind.as_str());
        }
        if let Some(subject) = &self.subject {
            route = route.query("subject", subject);
        }
        route
    }
}

/// An event in one line.
fn line(event: &Event) -> String {
    let Event { sequence, kind, at_ms, subject, data, .. } = event;
    let text = |name: &str| data.get(name).and_then(|value| value.as_str());
    let words = [text("name"), text("reason"), text("cause"), text("recovered_from")];
    let words: Vec<_> = words.into_iter().flatten().map(plain).collect();
    let line = format!(
        "{sequence:>6}  {}  {:<18}  {}  {}",
        units::show_stamp(at_ms.saturating_mul(1000)),
        kind.as_str(),
        plain(subject),
        words.join("  ")
    );
    line.trim_end().to_owned()
}
