//! `torpor mcp install`: what known clients want to be told. Nothing is written.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};
use torpor_client::Client;

use crate::error::{Error, Result};
use crate::output;

/// Stands for a key, which is not shown.
const KEY: &str = "<API key>";
const KEY_VARIABLE: &str = "TORPOR_API_KEY";
const SERVER_VARIABLE: &str = "TORPOR_SERVER";

/// Print the snippet that makes a known client use this server; writes no file.
#[derive(Debug, Args)]
pub(super) struct Install {
    /// The client [default: all known].
    #[arg(long, value_enum)]
    client: Option<Known>,
    /// The sandbox whose tools are offered: name or id [default: manage sandboxes].
    #[arg(long, value_name = "SANDBOX")]
    sandbox: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Known {
    ClaudeDesktop,
    ClaudeCode,
    Cursor,
    Vscode,
    Windsurf,
    Zed,
    Codex,
}

/// How one client is told.
#[derive(Debug, Serialize)]
struct Snippet {
    client: &'static str,
    /// Where it goes: a file, or a shell.
    place: &'static str,
    snippet: String,
}

/// The command that a client starts.
struct Start {
    name: String,
    program: String,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
}

impl Install {
    pub(super) fn run(self, client: &Client) -> Result<ExitCode> {
        let start = self.start(client)?;
        let wanted = self.client.map_or(Known::value_variants().to_vec(), |one| vec![one]);
        let snippets: Vec<_> = wanted.into_iter().map(|known| known.snippet(&start)).collect();
        let alone = snippets.len() == 1;
        output::show(self.json, &json!({"clients": snippets}), || {
            let text = |it: &Snippet| match alone {
                // What is piped somewhere is the snippet alone.
                true => format!("{}\n", it.snippet),
                false => format!("# {}: {}\n{}\n", it.client, it.place, it.snippet),
            };
            snippets.iter().map(text).collect::<Vec<_>>().join("\n")
        })?;
        if let ([one], false) = (snippets.as_slice(), self.json) {
            output::note(&format!("{} wants this in {}", one.client, one.place));
        }
        Ok(ExitCode::SUCCESS)
    }

    fn start(&self, client: &Client) -> Result<Start> {
        // Desktop clients do not know the paths of a shell.
        let program =
            std::env::current_exe().map_err(|error| Error::local("find torpor", error))?;
        let mut arguments = vec!["mcp".to_owned()];
        if let Some(sandbox) = &self.sandbox {
            arguments.extend(["--sandbox".to_owned(), sandbox.clone()]);
        }
        let mut environment = vec![(SERVER_VARIABLE, client.server().to_string())];
        if client.has_key() {
            environment.push((KEY_VARIABLE, KEY.to_owned()));
        }
        let name = self.sandbox.as_ref().map_or("torpor".to_owned(), |it| format!("torpor-{it}"));
        Ok(Start { name, program: program.display().to_string(), arguments, environment })
    }
}

impl Known {
    fn snippet(self, start: &Start) -> Snippet {
        let server = start.server();
        let named = |key: &str, server: Value| pretty(&json!({key: {start.name.as_str(): server}}));
        let (client, place, snippet) = match self {
            Self::ClaudeDesktop => (
                "claude-desktop",
                "claude_desktop_config.json (Settings, Developer, Edit Config)",
                named("mcpServers", server),
            ),
            Self::ClaudeCode => {
                ("claude-code", "a shell", start.shell("claude mcp add", "-e", "--"))
            }
            Self::Cursor => ("cursor", "~/.cursor/mcp.json", named("mcpServers", server)),
            Self::Vscode => {
                let mut server = server;
                server["type"] = json!("stdio");
                ("vscode", ".vscode/mcp.json", named("servers", server))
            }
            Self::Windsurf => {
                ("windsurf", "~/.codeium/windsurf/mcp_config.json", named("mcpServers", server))
            }
            Self::Zed => ("zed", "~/.config/zed/settings.json", named("context_servers", server)),
            Self::Codex => ("codex", "a shell", start.shell("codex mcp add", "--env", "--")),
        };
        Snippet { client, place, snippet }
    }
}

impl Start {
    fn server(&self) -> Value {
        let environment: serde_json::Map<String, Value> =
            self.environment.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        json!({"command": self.program, "args": self.arguments, "env": environment})
    }

    /// A line for a shell: name, variables, and behind `then` the command.
    fn shell(&self, add: &str, variable: &str, then: &str) -> String {
        let mut words: Vec<String> = vec![add.to_owned(), quoted(&self.name)];
        for (key, value) in &self.environment {
            words.extend([variable.to_owned(), quoted(&format!("{key}={value}"))]);
        }
        words.extend([then.to_owned(), quoted(&self.program)]);
        words.extend(self.arguments.iter().map(|word| quoted(word)));
        words.join(" ")
    }
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// As one word of a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Start {
        Start {
            name: "torpor-web".to_owned(),
            program: "/opt/my tools/torpor".to_owned(),
            arguments: ["mcp", "--sandbox", "web"].map(str::to_owned).to_vec(),
            environment: vec![(KEY_VARIABLE, KEY.to_owned())],
        }
    }

    #[test]
    fn every_known_client_gets_the_command_in_its_own_words() {
        for known in Known::value_variants() {
            let Snippet { client, place, snippet } = known.snippet(&start());
            assert!(
                snippet.contains("my tools/torpor") && snippet.contains("torpor-web"),
                "{client}"
            );
            assert!(snippet.contains(KEY) && !place.is_empty(), "{client}: {snippet}");
            let json = serde_json::from_str::<Value>(&snippet);
            assert_eq!(json.is_ok(), place != "a shell", "{client}: {snippet}");
        }
    }

    #[test]
    fn a_word_of_a_shell_stays_one() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("K=v"), "K=v");
        assert_eq!(quoted(""), "''");
    }
}
