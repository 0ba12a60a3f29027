//! `torpor cp`: what goes where is decided here, as `docker cp` does it; the bytes go in
//! [`download`] and [`upload`].

mod download;
mod place;
mod upload;

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::ErrorCode;
use torpor_protocol::SandboxRef;
use torpor_protocol::api::FileEntry;

use crate::error::{Error, Result};

pub(super) use download::receive;
pub(super) use place::Place;
pub(super) use upload::{note_left_out, packed};

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
        match (self.source, self.destination) {
            (Place::Inside { sandbox, path }, Place::Here(to)) => {
                download::to_path(client, &sandbox, &path, &to).await?;
            }
            (Place::Inside { sandbox, path }, Place::Stdio) => {
                download::to_stdout(client, &sandbox, &path).await?;
            }
            (Place::Here(from), Place::Inside { sandbox, path }) => {
                upload::from_path(client, &from, &sandbox, &path).await?;
            }
            (Place::Stdio, Place::Inside { sandbox, path }) => {
                upload::from_stdin(client, &sandbox, &path).await?;
            }
            (Place::Inside { .. }, Place::Inside { .. }) => {
                return Err(Error::Usage {
                    message: "one side has to be here".to_owned(),
                    hint: Some(
                        "torpor cp a:/x - | torpor cp - b:/x goes from one to another".into(),
                    ),
                });
            }
            (Place::Here(_) | Place::Stdio, Place::Here(_) | Place::Stdio) => {
                return Err(Error::Usage {
                    message: "neither side is in a sandbox".to_owned(),
                    hint: Some("a place in a sandbox is written SANDBOX:PATH".to_owned()),
                });
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// What is at a path inside.
#[derive(Debug, Clone, PartialEq, Eq)]
enum There {
    Nothing,
    Directory,
    File(FileEntry),
}

/// Looks; a link to a directory is a directory.
async fn look(client: &Client, sandbox: &SandboxRef, path: &str) -> Result<There> {
    let found = match stat(client, sandbox, path).await? {
        None => return Ok(There::Nothing),
        Some(found) => found,
    };
    match found.kind.as_str() {
        "directory" => Ok(There::Directory),
        "symlink" => {
            // With a dot at its end the path is resolved to its end.
            let behind = stat(client, sandbox, &format!("{}/.", path.trim_end_matches('/'))).await;
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

async fn stat(client: &Client, sandbox: &SandboxRef, path: &str) -> Result<Option<FileEntry>> {
    let route = Route::sandbox(sandbox).then("/files/stat").query("path", path);
    Ok(client.find(&route, ErrorCode::FileNotFound).await?)
}
