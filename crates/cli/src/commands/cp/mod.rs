//! `torpor cp`: what goes where is decided here, as `docker cp` does it; the bytes go in
//! [`download`] and [`upload`].

mod download;
mod place;
mod upload;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::FileEntry;

use crate::error::{Error, Result};

pub(super) use download::receive;
pub(super) use place::Place;
pub(super) use upload::{note_left_out, packed, packed_after};

/// Copy files and directories to and from a sandbox.
///
/// A file goes to the path that is named, or into it if that is a directory. A directory goes into
/// a directory that exists, else becomes it; of DIR/. only what is in it goes. `-` is standard input
/// or output: the bytes of a file, or the tar of a directory.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor cp notes.txt web:/tmp/\n  \
    torpor cp src/. web:/app\n  torpor cp web:/var/log ./logs\n  \
    torpor cp web:/etc/hosts - | wc -l\n  tar c . | torpor cp - web:/app/")]
pub(super) struct Cp {
    /// A path here, SANDBOX:PATH, or -
    #[arg(value_name = "SOURCE")]
    source: Place,
    /// A path here, SANDBOX:PATH, or -
    #[arg(value_name = "DESTINATION")]
    destination: Place,
}

impl Cp {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let side = |place| match place {
            Place::Inside { sandbox, path } => Side::Inside(Route::sandbox(&sandbox), path),
            Place::Here(path) => Side::Here(path),
            Place::Stdio => Side::Stdio,
        };
        copy(client, side(self.source), side(self.destination), ("a sandbox", "SANDBOX:PATH")).await
    }
}

/// A side of a copy, whatever has the files.
pub(super) enum Side {
    Stdio,
    Here(PathBuf),
    /// Files below this route, and the path there.
    Inside(Route, String),
}

/// Copies from one side to the other; `inside` is what has files, and `written` how a place in it is written.
pub(super) async fn copy(
    client: &Client,
    source: Side,
    destination: Side,
    (inside, written): (&str, &str),
) -> Result<ExitCode> {
    match (source, destination) {
        (Side::Inside(of, path), Side::Here(to)) => {
            download::to_path(client, &of, &path, &to).await?;
        }
        (Side::Inside(of, path), Side::Stdio) => download::to_stdout(client, &of, &path).await?,
        (Side::Here(from), Side::Inside(of, path)) => {
            upload::from_path(client, &from, &of, &path).await?;
        }
        (Side::Stdio, Side::Inside(of, path)) => upload::from_stdin(client, &of, &path).await?,
        (Side::Inside(..), Side::Inside(..)) => {
            return Err(Error::Usage {
                message: "one side has to be here".to_owned(),
                hint: Some("torpor cp a:/x - | torpor cp - b:/x goes from one to another".into()),
            });
        }
        (Side::Here(_) | Side::Stdio, Side::Here(_) | Side::Stdio) => {
            return Err(Error::Usage {
                message: format!("neither side is in {inside}"),
                hint: Some(format!("a place in {inside} is written {written}")),
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What is at a path inside.
#[derive(Debug, Clone, PartialEq, Eq)]
enum There {
    Nothing,
    Directory,
    File(FileEntry),
}

/// Looks; a link to a directory is a directory.
async fn look(client: &Client, of: &Route, path: &str) -> Result<There> {
    let found = match stat(client, of, path).await? {
        None => return Ok(There::Nothing),
        Some(found) => found,
    };
    match found.kind.as_str() {
        "directory" => Ok(There::Directory),
        "symlink" => {
            // With a dot at its end the path is resolved to its end.
            let behind = stat(client, of, &format!("{}/.", path.trim_end_matches('/'))).await;
            match behind {
                Ok(Some(behind)) if behind.kind == "directory" => Ok(There::Directory),
                // A link to a file is no error here, whatever the kernel thinks of the dot.
                Ok(_) => Ok(There::File(found)),
                Err(error) if error.code().is_some() => Ok(There::File(found)),
                Err(error) => Err(error),
            }
        }
        _ => Ok(There::File(found)),
    }
}

async fn stat(client: &Client, of: &Route, path: &str) -> Result<Option<FileEntry>> {
    let route = of.clone().then("/files/stat").query("path", path);
    Ok(client.find(&route, ErrorCode::FileNotFound).await?)
}
