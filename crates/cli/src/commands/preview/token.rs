//! `torpor preview token`

use std::time::Duration;

use clap::Subcommand;
use torpor_client::{Client, Route};
use torpor_protocol::TokenId;
use torpor_protocol::preview::{CreatePreviewToken, PreviewToken, PreviewTokenList};

use super::Which;
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::units;

#[derive(Debug, Subcommand)]
pub(super) enum Token {
    /// Create a token and print the URL with it; it is not shown again.
    Create {
        #[command(flatten)]
        which: Which,
        /// How long it is valid, such as 10m. Default: as long as the preview lives.
        #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
        ttl: Option<Duration>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List tokens, without their texts.
    Ls {
        #[command(flatten)]
        which: Which,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Revoke tokens; connections that they opened are cut off.
    Rm {
        #[command(flatten)]
        which: Which,
        /// Ids of the tokens.
        #[arg(required = true)]
        tokens: Vec<TokenId>,
    },
}

fn route(which: &Which) -> Route {
    which.route().then("/tokens")
}

impl Token {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        match self {
            Self::Create { which, ttl, json } => {
                let ttl_ms = ttl.map(units::millis);
                let request = CreatePreviewToken { ttl_ms, expires_at_ms: None };
                let made = client.post(&route(&which), &request).await;
                let made: PreviewToken = made.map_err(|error| which.not_found(error))?;
                if json { output::json(&made) } else { show(&made) }
            }
            Self::Ls { which, json } => {
                let list = client.list(&route(&which)).await;
                let list: PreviewTokenList = list.map_err(|error| which.not_found(error))?;
                output::show(json, &list, || table(&list.tokens, units::now_ms()))
            }
            Self::Rm { which, tokens } => {
                for token in &tokens {
                    client.delete(&route(&which).part(token.as_str())).await?;
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
