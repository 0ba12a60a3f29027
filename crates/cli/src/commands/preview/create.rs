//! `torpor preview create`

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use torpor_client::Client;
use torpor_protocol::preview::{
    CreatePreview, CreatePreviewToken, Preview, PreviewLabel, PreviewToken,
};
use torpor_protocol::{Name, SandboxRef};

use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::units;

/// Create a preview of a port and print its address.
///
/// Unless it is public, the URL that is printed has a token in it, which is not shown again.
#[derive(Debug, Args)]
pub(super) struct Create {
    /// Name or id of the sandbox.
    sandbox: SandboxRef,
    /// A server inside listens on it, or will; 127.0.0.1 is enough.
    port: NonZeroU16,
    /// Tells it from others of the sandbox. Default: port- and the port.
    #[arg(long)]
    name: Option<Name>,
    /// Everybody may come.
    #[arg(long, conflicts_with = "token")]
    public: bool,
    /// Who comes needs a token; this is the default.
    #[arg(long)]
    token: bool,
    /// What its host names begin with. Default: letters that nobody guesses.
    #[arg(long)]
    prefix: Option<PreviewLabel>,
    /// How long it lives, such as 1h. Default: as long as the sandbox.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    ttl: Option<Duration>,
    /// Pages of this origin may use it from a browser, such as https://app.example.com; '*': of all.
    #[arg(long, value_name = "ORIGIN", num_args = 1..)]
    cors: Vec<String>,
    /// Put into every request on its way in.
    #[arg(long, value_name = "NAME:VALUE", value_parser = parse_header)]
    request_header: Vec<(String, String)>,
    /// Put into every answer on its way out; without a value: taken away.
    #[arg(long, value_name = "NAME:VALUE", value_parser = parse_header)]
    response_header: Vec<(String, String)>,
    /// WebSockets that are silent stay open while the sandbox sleeps, and wake it with the next byte.
    #[arg(long)]
    keep_open: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// What was made.
#[derive(Serialize)]
struct Made {
    #[serde(flatten)]
    preview: Preview,
    /// What opens it, if it is private.
    token: Option<PreviewToken>,
}

impl Create {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let (sandbox, json) = (self.sandbox.clone(), self.json);
        let route = super::route(&sandbox);
        let preview: Preview = client.post(&route, &self.request()?).await?;
        let token: Option<PreviewToken> = if preview.public {
            None
        } else {
            let route = route.part(preview.name.as_str()).then("/tokens");
            Some(client.post(&route, &CreatePreviewToken::default()).await?)
        };
        if json {
            return output::json(&Made { preview, token });
        }
        let urls = token.as_ref().map_or(&preview.urls, |token| &token.urls);
        let url =
            urls.first().ok_or_else(|| Error::failed("the daemon does not say where it is"))?;
        output::line(&plain(url))?;
        if token.is_some() {
            output::note(&format!(
                "keep it: its token is not shown again; torpor preview token create {sandbox} {} makes \
                 others",
                preview.name
            ));
        }
        Ok(())
    }

    fn request(self) -> Result<CreatePreview> {
        Ok(CreatePreview {
            port: self.port,
            name: self.name,
            public: self.public,
            prefix: self.prefix,
            ttl_ms: self.ttl.map(units::millis),
            expires_at_ms: None,
            request_headers: rules(self.request_header)?,
            response_headers: rules(self.response_header)?,
            cors: self.cors,
            keep_open: self.keep_open,
        })
    }
}

fn rules(pairs: Vec<(String, String)>) -> Result<BTreeMap<String, String>> {
    let mut rules = BTreeMap::new();
    for (name, value) in pairs {
        if let Some(twice) = rules.insert(name.to_ascii_lowercase(), value).map(|_| name) {
            return Err(Error::usage(format!("the header {twice} is there twice")));
        }
    }
    Ok(rules)
}

/// `Name: value`, as in HTTP.
fn parse_header(text: &str) -> Result<(String, String), String> {
    match text.split_once(':') {
        Some((name, value)) if !name.trim().is_empty() => {
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        }
        Some(_) | None => Err("it is written NAME:VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_http_writes_them() {
        let pair = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        assert_eq!(parse_header("X-A: b:c"), pair("X-A", "b:c"));
        assert_eq!(parse_header("x-frame-options:"), pair("x-frame-options", ""));
        assert!(parse_header(":b").is_err() && parse_header("a").is_err());
        let twice = vec![("A".to_owned(), String::new()), ("a".to_owned(), String::new())];
        assert!(rules(twice).is_err());
    }
}
