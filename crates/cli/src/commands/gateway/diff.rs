//! `torpor gateway diff`, `approve` and `reject`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::Name;
use torpor_protocol::mcp_gateway::{
    DecideMcpItems, McpChange, McpDiff, McpDifference, McpFlag, McpServer,
};

use super::{describe, route};
use crate::error::Result;
use crate::output::{self, plain, plain_lines};

/// Lines of one side that are compared; longer texts are shown one after the other.
const LINES_MAX: usize = 2000;

/// Show what a server shows against what is approved; exits with 1 if they differ.
///
/// Invisible characters are written out.
#[derive(Debug, Args)]
pub(super) struct Diff {
    name: Name,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Approve what differs.
#[derive(Debug, Args)]
pub(super) struct Approve {
    name: Name,
    #[command(flatten)]
    which: Which,
    /// Also what has invisible characters in it.
    #[arg(long)]
    allow_invisible: bool,
    /// Also what is called like something of another server, or looks so.
    #[arg(long)]
    allow_lookalikes: bool,
}

/// Reject what differs: it is not shown as new any more, and what was approved under its name is taken back.
#[derive(Debug, Args)]
pub(super) struct Reject {
    name: Name,
    #[command(flatten)]
    which: Which,
}

#[derive(Debug, Args)]
struct Which {
    /// Only these, by name; may be given several times [default: all that differ].
    #[arg(long = "tool", value_name = "NAME")]
    tools: Vec<String>,
    /// Digest that `diff` ended with: nothing is done if the server shows something else by now [default:
    /// what it shows now].
    #[arg(long)]
    digest: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

fn of(name: &Name, what: &str) -> Route {
    route().part(name.as_str()).then(what)
}

impl Diff {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let diff: McpDiff = client.get(&of(&self.name, "/diff")).await?;
        let differ = diff.differences.iter().any(|difference| !difference.rejected);
        output::show(self.json, &diff, || shown(&self.name, &diff))?;
        Ok(if differ { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

impl Approve {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let Self { name, which, allow_invisible, allow_lookalikes } = self;
        let json = which.json;
        let wanted = DecideMcpItems {
            allow_invisible,
            allow_lookalikes,
            ..which.wanted(client, &name).await?
        };
        let server: McpServer = client.post(&of(&name, "/approve"), &wanted).await?;
        output::show(json, &server, || output::fields(&describe(&server)))
    }
}

impl Reject {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let json = self.which.json;
        let wanted = self.which.wanted(client, &self.name).await?;
        let server: McpServer = client.post(&of(&self.name, "/reject"), &wanted).await?;
        output::show(json, &server, || output::fields(&describe(&server)))
    }
}

impl Which {
    async fn wanted(self, client: &Client, name: &Name) -> Result<DecideMcpItems> {
        let digest = match self.digest {
            Some(digest) => digest,
            None => client.get::<McpDiff>(&of(name, "/diff")).await?.digest,
        };
        Ok(DecideMcpItems { digest, names: self.tools, ..DecideMcpItems::default() })
    }
}

fn shown(name: &Name, diff: &McpDiff) -> String {
    if diff.differences.is_empty() {
        return "nothing differs from what is approved\n".to_owned();
    }
    let mut text: String = diff.differences.iter().map(shown_one).collect();
    text.push_str(&format!(
        "\napprove all of it: torpor gateway approve {name} --digest {}\n",
        diff.digest
    ));
    text
}

fn shown_one(of: &McpDifference) -> String {
    let change = match of.change {
        McpChange::New => "new",
        McpChange::Changed => "changed",
        McpChange::Removed => "removed",
    };
    let rejected = if of.rejected { ", rejected" } else { "" };
    let mut text = format!("=== {} {} ({change}{rejected})\n", of.kind.as_str(), plain(&of.name));
    for flag in &of.flags {
        let what = match flag {
            McpFlag::Invisible(what) => format!("has invisible characters: {what}"),
            McpFlag::LooksLike(other) => format!("is called like {other}, or looks so"),
            McpFlag::BadName(why) => format!("can't be passed on: {why}"),
        };
        text.push_str(&format!("!!! {}\n", plain(&what)));
    }
    let lines = |side: &Option<String>| -> Vec<String> {
        side.iter().flat_map(|text| text.lines().map(plain_lines).collect::<Vec<_>>()).collect()
    };
    for line in compared(&lines(&of.before), &lines(&of.after)) {
        text.push_str(&line);
        text.push('\n');
    }
    text
}

/// Lines with `-`, `+` or a space before them.
fn compared(before: &[String], after: &[String]) -> Vec<String> {
    if before.len() > LINES_MAX || after.len() > LINES_MAX {
        let (gone, new) = (
            before.iter().map(|line| format!("-{line}")),
            after.iter().map(|line| format!("+{line}")),
        );
        return gone.chain(new).collect();
    }
    // Lengths of the longest common rest from each pair of places.
    let width = after.len() + 1;
    let mut common = vec![0u16; (before.len() + 1) * width];
    for (row, old) in before.iter().enumerate().rev() {
        for (column, new) in after.iter().enumerate().rev() {
            common[row * width + column] = match old == new {
                true => common[(row + 1) * width + column + 1] + 1,
                false => common[(row + 1) * width + column].max(common[row * width + column + 1]),
            };
        }
    }
    let (mut row, mut column, mut lines) = (0, 0, Vec::new());
    while row < before.len() || column < after.len() {
        match (before.get(row), after.get(column)) {
            (Some(old), Some(new)) if old == new => {
                lines.push(format!(" {old}"));
                (row, column) = (row + 1, column + 1);
            }
            (Some(old), new)
                if new.is_none()
                    || common[(row + 1) * width + column] >= common[row * width + column + 1] =>
            {
                lines.push(format!("-{old}"));
                row += 1;
            }
            (_, Some(new)) => {
                lines.push(format!("+{new}"));
                column += 1;
            }
            (_, None) => break,
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stayed_is_told_from_what_changed() {
        let lines = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            compared(&lines("a b c d"), &lines("a x c d e")),
            [" a", "-b", "+x", " c", " d", "+e"]
        );
        assert_eq!(compared(&[], &lines("a")), ["+a"]);
        assert_eq!(compared(&lines("a"), &[]), ["-a"]);
    }
}
