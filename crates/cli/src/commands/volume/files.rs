//! Files of volumes and drives: the verbs that sandboxes have, on their routes.

use std::process::ExitCode;
use std::str::FromStr;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::FileList;
use torpor_protocol::{VolumeKind, VolumeRef};

use super::route;
use crate::commands::cat::print_body;
use crate::commands::cp::{Side, copy};
use crate::commands::ls;
use crate::error::Result;
use crate::output;

/// `data:/path`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InVolume {
    volume: VolumeRef,
    path: String,
}

impl FromStr for InVolume {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (volume, path) = text.split_once(':').ok_or("it is written NAME:PATH")?;
        let volume = volume.parse().map_err(|error| format!("{error}"))?;
        let slash = if path.starts_with('/') { "" } else { "/" };
        Ok(Self { volume, path: format!("{slash}{path}") })
    }
}

impl InVolume {
    pub(super) async fn list(
        &self,
        client: &Client,
        kind: VolumeKind,
        recursive: bool,
        json: bool,
    ) -> Result<()> {
        let route = self.route(kind, "/files/list");
        let route = if recursive { route.query("recursive", "true") } else { route };
        let list: FileList = client.get(&route).await?;
        output::show(json, &list, || ls::table(&list.entries))
    }

    pub(super) async fn print(&self, client: &Client, kind: VolumeKind) -> Result<()> {
        print_body(client, &self.route(kind, "/files/content"), |_| ()).await
    }

    fn route(&self, kind: VolumeKind, what: &str) -> Route {
        route(kind, &self.volume).then(what).query("path", &self.path)
    }
}

#[derive(Debug, Args)]
pub(super) struct Cp {
    /// A path here, NAME:PATH, or -
    #[arg(value_name = "SOURCE")]
    source: Place,
    /// A path here, NAME:PATH, or -
    #[arg(value_name = "DESTINATION")]
    destination: Place,
}

/// A side of a copy. What has a colon is in a volume, unless it begins with `/` or `.`.
#[derive(Debug, Clone)]
enum Place {
    Stdio,
    Here(std::path::PathBuf),
    Inside(InVolume),
}

impl FromStr for Place {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "-" => Ok(Self::Stdio),
            "" => Err("the path is empty".to_owned()),
            text if text.contains(':') && !text.starts_with(['/', '.']) => {
                let inside = text.parse();
                inside
                    .map(Self::Inside)
                    .map_err(|why| format!("{why} (a path here is written ./{text})"))
            }
            text => Ok(Self::Here(text.into())),
        }
    }
}

impl Cp {
    pub(super) async fn run(self, client: &Client, kind: VolumeKind) -> Result<ExitCode> {
        let side = |place| match place {
            Place::Stdio => Side::Stdio,
            Place::Here(path) => Side::Here(path),
            Place::Inside(InVolume { volume, path }) => Side::Inside(route(kind, &volume), path),
        };
        copy(client, side(self.source), side(self.destination), ("a volume or drive", "NAME:PATH"))
            .await
    }
}
