//! `torpor preview token`

use std::time::Duration;

use clap::Subcommand;
use torpor_protocol::preview::{CreatePreviewToken, PreviewToken, PreviewTokenList};
use torpor_protocol::{Name, SandboxRef, TokenId};

use crate::client::{Client, Route};
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::units;

#[derive(Debug, Subcommand)]
pub(super) enum Token {
    /// Make a token and print the URL with it; it is not shown again.
    Create {
        /// Name or id of the sandbox.
        sandbox: SandboxRef,
        /// Name of the preview.
        preview: Name,
        /// How long it is valid, such as 10m. Default: as long as the preview lives.
        #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
        ttl: Option<Duration>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List tokens, without their texts.
    Ls {
        /// Name or id of the sandbox.
        sandbox: SandboxRef,
        /// Name of the preview.
        preview: Name,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Revoke tokens; connections that they opened are cut off.
    Rm {
        /// Name or id of the sandbox.
        sandbox: SandboxRef,
        /// Name of the preview.
        preview: Name,
        /// Ids of the tokens.
        #[arg(required = true)]
        tokens: Vec<TokenId>,
    },
}

fn route(sandbox: &SandboxRef, preview: &Name) -> Route {
    super::route(sandbox).part(preview.as_str()).then("/tokens")
}

impl Token {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        match self {
            Self::Create { sandbox, preview, ttl, json } => {
                let ttl_ms = ttl.map(units::millis);
                let request = CreatePreviewToken { ttl_ms, expires_at_ms: None };
                let made = client.post(&route(&sandbox, &preview), &request).await;
                let made: PreviewToken = made.map_err(|e| super::not_found(e, &sandbox))?;
                if json { output::json(&made) } else { show(&made) }
            }
            Self::Ls { sandbox, preview, json } => {
                let list = client.list(&route(&sandbox, &preview)).await;
                let list: PreviewTokenList = list.map_err(|e| super::not_found(e, &sandbox))?;
                match json {
                    true => output::json(&list),
                    false => output::print(&table(&list.tokens, units::now_ms())),
                }
            }
            Self::Rm { sandbox, preview, tokens } => {
                for token in &tokens {
                    client.delete(&route(&sandbox, &preview).part(token.as_str())).await?;
                    output::line(token.as_str())?;
                }
                Ok(())
            }
        }
    }
}

fn show(made: &PreviewToken) -> Result<()> {
    let text = made.urls.first().or(made.token.as_ref());
    let text = text.ok_or_else(|| Error::failed("the daemon does not say what the token is"))?;
    output::line(&plain(text))?;
    output::note("keep it: the token is not shown again");
    Ok(())
}

fn table(tokens: &[PreviewToken], now_ms: u64) -> String {
    let row = |token: &PreviewToken| {
        let ends = match token.expires_at_ms {
            Some(_) if token.expired => "over".to_owned(),
            Some(end) => format!("in {}", units::show_age(now_ms, end)),
            None => "never".to_owned(),
        };
        vec![token.id.to_string(), units::show_age(token.created_at_ms, now_ms), ends]
    };
    output::table(&["ID", "AGE", "ENDS"], tokens.iter().map(row).collect())
}
