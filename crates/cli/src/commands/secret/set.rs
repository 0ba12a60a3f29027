//! `torpor secret set`
//!
//! A value never comes from our arguments: everybody on this computer can read those.

use std::path::{Path, PathBuf};

use clap::Args;
use tokio::io::{AsyncRead, AsyncReadExt};
use torpor_client::Client;
use torpor_protocol::api::{Secret, SetSecret};
use torpor_protocol::{HostBinding, SecretName};

use super::route;
use crate::error::{Error, Result};
use crate::{output, terminal};

/// Longest value, in bytes; the daemon takes no longer one.
const VALUE_MAX: u64 = 64 * 1024;

/// Set a secret, and print its name.
///
/// The value is what comes on standard input, without the end of its last line; at a terminal it is
/// asked for and not shown. Sandboxes that start or wake from now on get it.
#[derive(Debug, Args)]
pub(super) struct Set {
    /// What it is called, and the variable that carries it.
    name: SecretName,
    /// It may be sent to this host only, and its placeholder is replaced there: api.example.com or
    /// '*.example.com' by TLS on port 443, api.example.com:8443 by TLS on that port,
    /// http://internal.example:8080 unencrypted; may be given several times [default: as before].
    #[arg(long, value_name = "HOST")]
    host: Vec<HostBinding>,
    /// It is bound to no host any more: it goes where routes say, by TLS on port 443, and its placeholder
    /// nowhere.
    #[arg(long, conflicts_with = "host")]
    no_host: bool,
    /// The value is what this file holds, to the byte.
    #[arg(long, value_name = "FILE")]
    from_file: Option<PathBuf>,
    /// Print all about it, but not the value, as JSON.
    #[arg(long)]
    json: bool,
}

impl Set {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let value = self.value().await?;
        if value.is_empty() {
            return Err(Error::Usage {
                message: "the value is empty".to_owned(),
                hint: Some(format!("to be without it: torpor secret rm {}", self.name)),
            });
        }
        let route = route().part(self.name.as_str());
        let given = self.no_host || !self.host.is_empty();
        let hosts = given.then(|| self.host.clone());
        let secret: Secret = client.put(&route, &SetSecret { value, hosts }).await?;
        output::show_line(self.json, &secret, secret.name.as_str())
    }

    async fn value(&self) -> Result<String> {
        if let Some(path) = &self.from_file {
            return from_file(path).await;
        }
        hidden(&format!("value of {} (it is not shown):", self.name)).await
    }
}

/// What comes on standard input; at a terminal it is asked for and not shown.
pub(in crate::commands) async fn hidden(question: &str) -> Result<String> {
    let text = if terminal::stdin_is_terminal() {
        terminal::hidden_line(question).await?
    } else {
        let read = text(tokio::io::stdin()).await;
        read.map_err(|error| error.local("read the value from standard input"))?
    };
    Ok(without_line_end(text))
}

async fn from_file(path: &Path) -> Result<String> {
    let what = format!("read the value from {}", path.display());
    let file = tokio::fs::File::open(path).await.map_err(|error| Error::local(&*what, error))?;
    text(file).await.map_err(|error| error.local(&what))
}

/// Why there is no value; nothing of it is repeated.
enum Unreadable {
    Io(std::io::Error),
    Long,
    Binary,
}

impl Unreadable {
    fn local(self, what: &str) -> Error {
        match self {
            Self::Io(error) => Error::local(what, error),
            Self::Long => Error::failed(format!("the value has more than {VALUE_MAX} bytes")),
            Self::Binary => Error::Failed {
                message: "the value is no text (UTF-8)".to_owned(),
                hint: Some("encode it, for example with base64".to_owned()),
            },
        }
    }
}

/// All of it, as long as it may be.
async fn text(from: impl AsyncRead + Unpin) -> std::result::Result<String, Unreadable> {
    let mut bytes = Vec::new();
    let read = from.take(VALUE_MAX + 1).read_to_end(&mut bytes).await;
    if read.map_err(Unreadable::Io)? as u64 > VALUE_MAX {
        return Err(Unreadable::Long);
    }
    String::from_utf8(bytes).map_err(|_| Unreadable::Binary)
}

fn without_line_end(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_of_the_last_line_is_not_part_of_a_value() {
        for (text, value) in [
            ("a", "a"),
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\nb\n\n", "a\nb\n"),
            ("\n", ""),
            ("\r", "\r"),
        ] {
            assert_eq!(without_line_end(text.to_owned()), value, "{text:?}");
        }
    }
}
