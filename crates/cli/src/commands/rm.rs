//! `torpor rm`

use std::process::ExitCode;

use clap::Args;
use futures_util::{StreamExt, stream};
use torpor_client::{Client, Route};
use torpor_protocol::{ErrorCode, SandboxRef, Status};

use super::sandboxes;
use crate::error::{EXIT_FAILED, Error, Result};
use crate::progress::Progress;
use crate::{output, terminal};

/// Removals under way at once.
const PARALLEL: usize = 8;

/// Remove sandboxes with everything in them.
#[derive(Debug, Args)]
pub(super) struct Rm {
    /// Names or ids.
    #[arg(required_unless_present = "all")]
    sandboxes: Vec<SandboxRef>,
    /// Those that do not exist are fine.
    #[arg(short, long)]
    force: bool,
    /// Remove all sandboxes.
    #[arg(long, conflicts_with = "sandboxes")]
    all: bool,
    /// Do not ask.
    #[arg(short, long)]
    yes: bool,
}

impl Rm {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let titles = if self.all {
            let statuses: Vec<Status> = client.sandboxes(&[], None).await?;
            let titles: Vec<String> =
                statuses.iter().map(|status| sandboxes::title(status).to_owned()).collect();
            if titles.is_empty() || !(self.yes || confirmed(titles.len())?) {
                return Ok(ExitCode::SUCCESS);
            }
            titles
        } else {
            self.sandboxes.iter().map(ToString::to_string).collect()
        };
        let single = titles.len() == 1;
        let progress = Progress::waiting(match &titles[..] {
            [one] => format!("removing {one}"),
            many => format!("removing {} sandboxes", many.len()),
        });
        let removals = titles.into_iter().map(|title| async move {
            let result = client.delete(&Route::sandbox(&title)).await;
            (title, result.map_err(Error::from))
        });
        let mut removals = stream::iter(removals).buffered(PARALLEL);
        let mut failed = false;
        while let Some((title, result)) = removals.next().await {
            match result {
                Ok(()) => output::line(&title)?,
                Err(error) if self.tolerates(&error) => (),
                // Alone, it is the error of this verb.
                Err(error) if single => return Err(error),
                Err(error) => {
                    failed = true;
                    progress.note(&format!("{title}: {}", error.render(false).trim_end()));
                }
            }
        }
        Ok(if failed { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS })
    }

    fn tolerates(&self, error: &Error) -> bool {
        // Somebody else may have been quicker with one of all.
        (self.force || self.all) && error.code() == Some(ErrorCode::SandboxNotFound)
    }
}

fn confirmed(count: usize) -> Result<bool> {
    terminal::confirmed(&format!("remove all {count} sandboxes with everything in them?"))
}
