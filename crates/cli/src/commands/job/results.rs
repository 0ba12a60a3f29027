//! `torpor job logs`, `torpor job results`: what a task said and left. What comes is not trusted: see
//! `archive::unpack`.

use std::fs;
use std::io;
use std::path::PathBuf;

use clap::Args;
use http::Method;
use torpor_client::{Client, body};
use torpor_protocol::ExecutionId;
use torpor_protocol::api::Log;
use torpor_protocol::job::Task;

use super::task;
use crate::archive::{self, Directory};
use crate::commands::cp::receive;
use crate::commands::logs;
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;

/// Show what the command of a task said, also when its sandbox is gone.
#[derive(Debug, Args)]
pub(super) struct Logs {
    execution: ExecutionId,
    /// Its place among the inputs, from 0.
    task: u32,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Logs {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let log: Log = client.list(&task(&self.execution, self.task).then("/log")).await?;
        output::show(self.json, &log, || log.lines.iter().map(logs::show).collect::<String>())
    }
}

/// Show the result of a task, or copy the files that it left.
#[derive(Debug, Args)]
pub(super) struct Results {
    execution: ExecutionId,
    /// Its place among the inputs, from 0.
    task: u32,
    /// Directory to copy the files into; it is made if need be.
    directory: Option<PathBuf>,
    /// As JSON.
    #[arg(long, conflicts_with = "directory")]
    json: bool,
}

impl Results {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let route = task(&self.execution, self.task);
        let Some(to) = self.directory else {
            let found: Task = client.get(&route).await?;
            return output::show(self.json, &found, || {
                super::show::tasks(std::slice::from_ref(&found))
            });
        };
        let response = client.send(Method::GET, &route.then("/files"), body::empty()).await?;
        let shown = to.display().to_string();
        let cannot = move |error| Error::local(format!("can't write to {shown}"), error);
        if let Err(error) = fs::create_dir(&to)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(cannot(error));
        }
        let progress = Progress::bytes(None, "results");
        let work = move |mut content| {
            let unpacked = archive::unpack(&mut content, &Directory::open(&to)?)?;
            // The end of the tar is not the end of the answer; only that one says that all came.
            io::copy(&mut content, &mut io::sink())?;
            Ok(unpacked)
        };
        let unpacked = receive(response.into_body(), &progress, work).await?.map_err(cannot)?;
        drop(progress);
        if unpacked.left_out > 0 {
            output::note(&format!("torpor: {} devices or pipes were left out", unpacked.left_out));
        }
        Ok(())
    }
}
