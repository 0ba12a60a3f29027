//! `torpor service traffic`

use std::str::FromStr;

use clap::Args;
use torpor_client::Client;
use torpor_protocol::Name;
use torpor_protocol::hosting::{HostedService, RevisionRef, SetTraffic, TrafficTarget};

use super::{of, show};
use crate::error::Result;
use crate::output;

/// Show which revisions answer, or say so; in force with the next request.
///
/// What is said replaces all there was, tags too. The percents are 100 together.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor service traffic api\n  \
    torpor service traffic api 3=80 latest=20\n  \
    torpor service traffic api 3=100 4=0:next       4 has an address of its own")]
pub(super) struct Traffic {
    name: Name,
    /// Which revision gets how many percent, and under which tag it is found besides.
    #[arg(value_name = "REVISION=PERCENT[:TAG]")]
    targets: Vec<Target>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Target(TrafficTarget);

impl FromStr for Target {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let form =
            || "it is written REVISION=PERCENT, such as 3=80, or REVISION=PERCENT:TAG".to_owned();
        let (revision, rest) = text.split_once('=').ok_or_else(form)?;
        let (percent, tag) = match rest.split_once(':') {
            Some((percent, tag)) => (percent, Some(tag)),
            None => (rest, None),
        };
        let percent = percent.trim_end_matches('%').parse().map_err(|_| form())?;
        let tag = tag.map(str::parse::<Name>).transpose().map_err(|error| error.to_string())?;
        let revision: RevisionRef = revision.parse().map_err(|error| format!("{error}"))?;
        Ok(Self(TrafficTarget { revision, percent, tag }))
    }
}

impl Traffic {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let service: HostedService = if self.targets.is_empty() {
            client.get(&of(&self.name)).await?
        } else {
            let traffic = self.targets.into_iter().map(|target| target.0).collect();
            client.put(&of(&self.name).then("/traffic"), &SetTraffic { traffic }).await?
        };
        output::show(self.json, &service, || show::traffic(&service))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_traffic_is_written_short() {
        let parse = |text: &str| text.parse::<Target>().map(|target| target.0);
        let tag = Some("next".parse().unwrap());
        let latest = TrafficTarget { revision: RevisionRef::Latest, percent: 0, tag };
        assert_eq!(parse("latest=0:next"), Ok(latest));
        assert_eq!(parse("3=80%").unwrap().percent, 80);
        for text in ["3", "3=x", "x=1", "3=300", "3=1:Bad"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
