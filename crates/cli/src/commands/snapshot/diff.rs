//! `torpor snapshot diff`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SnapshotRef;
use torpor_protocol::snapshot::{Difference, FileDiff, FileDifference};

use crate::error::Result;
use crate::output::{self, plain};
use crate::progress::Progress;

/// Show which files differ between a snapshot and its image, or between two snapshots.
///
/// A line a file: A was added, M was changed (content, kind, owner or permissions), D was removed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor snapshot diff base            \
    what was done to the image\n  torpor snapshot diff base later      what was done since")]
pub(super) struct Diff {
    /// Name or id.
    snapshot: SnapshotRef,
    /// What it became: name or id of another snapshot.
    other: Option<SnapshotRef>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Diff {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::snapshot(&self.snapshot).then("/diff");
        let route = match &self.other {
            Some(other) => route.query("to", &other.to_string()),
            None => route,
        };
        let progress = Progress::waiting(format!("comparing {}", self.snapshot));
        let diff: FileDiff = client.get(&route).await?;
        drop(progress);
        output::show(self.json, &diff, || text(&diff, output::coloured()))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(diff: &FileDiff, coloured: bool) -> String {
    let line = |file: &FileDifference| {
        let (letter, colour) = match file.change {
            Difference::Added => ('A', "\x1b[32m"),
            Difference::Modified => ('M', "\x1b[33m"),
            Difference::Removed => ('D', "\x1b[31m"),
        };
        let path = plain(&file.path);
        match coloured {
            true => format!("{colour}{letter} {path}\x1b[0m\n"),
            false => format!("{letter} {path}\n"),
        }
    };
    diff.changes.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_a_letter_and_a_path_that_does_nothing() {
        let change = |path: &str, change| FileDifference {
            path: path.into(),
            change,
            before: None,
            after: None,
        };
        let diff = FileDiff {
            changes: vec![
                change("/a", Difference::Added),
                change("/m\x1b[2J", Difference::Modified),
                change("/d", Difference::Removed),
            ],
        };
        assert_eq!(text(&diff, false), "A /a\nM /m\\u{1b}[2J\nD /d\n");
        assert!(text(&diff, true).starts_with("\x1b[32mA /a\x1b[0m\n"));
    }
}
