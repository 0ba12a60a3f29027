//! `torpor service invoke`

use std::time::Duration;

use clap::Args;
use torpor_client::Client;
use torpor_protocol::Name;
use torpor_protocol::invocation::{Callback, Invocation, InvocationState, Invoke as Wish};

use super::of;
use crate::commands::parse_pair;
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::progress::Progress;

/// How often it is asked how it stands.
const LOOK: Duration = Duration::from_millis(200);

/// Invoke a service in the background, and print the id, or with --wait the answer.
///
/// The request is recorded before it is answered, and runs at least once, also if the daemon is killed meanwhile.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor service invoke api /reports --data '{\"month\": 5}' --wait\n  \
    TORPOR_CALLBACK_SECRET=whsec_… torpor service invoke api /reports --callback https://example.com/done\n  \
    torpor service invoke api --show inv-3b1kq…"
)]
pub(super) struct Invoke {
    name: Name,
    /// With its query.
    #[arg(default_value = "/")]
    path: String,
    /// Default: POST.
    #[arg(short = 'X', long, default_value = "POST")]
    method: String,
    /// The body.
    #[arg(short, long, default_value = "", hide_default_value = true)]
    data: String,
    /// A header; may be given several times.
    #[arg(short = 'H', long, value_name = "NAME=VALUE", value_parser = parse_pair)]
    header: Vec<(String, String)>,
    /// Further attempts after one that failed.
    #[arg(long, value_name = "N", default_value_t = 2)]
    retries: u32,
    /// Run by the revision with this tag [default: as the traffic says].
    #[arg(long)]
    tag: Option<Name>,
    /// Post how it ended to this URL, signed as Standard Webhooks says.
    #[arg(long, value_name = "URL", requires = "callback_secret")]
    callback: Option<String>,
    /// What the callback is signed with: whsec_ and 24 to 64 bytes in base64.
    #[arg(long, value_name = "SECRET", env = "TORPOR_CALLBACK_SECRET", hide_env_values = true)]
    callback_secret: Option<String>,
    /// Wait for the answer and print its body; fails if all attempts did.
    #[arg(short, long)]
    wait: bool,
    /// Show an invocation instead of making one.
    #[arg(long, value_name = "ID", conflicts_with_all = ["data", "header", "wait", "tag", "callback"])]
    show: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Invoke {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let route = of(&self.name).then("/invocations");
        if let Some(id) = &self.show {
            let invocation: Invocation = client.get(&route.part(id)).await?;
            return output::show(self.json, &invocation, || describe(&invocation));
        }
        let wish = Wish {
            method: self.method,
            path: self.path,
            headers: self.header.into_iter().collect(),
            body: self.data,
            retries: self.retries,
            tag: self.tag,
            callback: self
                .callback
                .zip(self.callback_secret)
                .map(|(url, secret)| Callback { url, secret }),
            ..Wish::default()
        };
        let mut invocation: Invocation = client.post(&route, &wish).await?;
        if !self.wait {
            return output::show_line(self.json, &invocation, invocation.id.as_str());
        }
        let progress = Progress::waiting(format!("{} runs", invocation.id));
        let route = route.part(invocation.id.as_str());
        while !invocation.state.is_settled() {
            tokio::time::sleep(LOOK).await;
            invocation = client.get(&route).await?;
        }
        drop(progress);
        if self.json {
            output::json(&invocation)?;
        } else if let Some(answer) = &invocation.answer {
            output::line(&answer.body)?;
        }
        match invocation.state {
            InvocationState::Succeeded | InvocationState::Queued | InvocationState::Running => {
                Ok(())
            }
            InvocationState::Failed => {
                let why = invocation.message.as_deref().map(plain).unwrap_or_default();
                Err(Error::failed(format!("{} failed: {why}", invocation.id)))
            }
        }
    }
}

fn describe(invocation: &Invocation) -> String {
    let mut fields = vec![
        ("id", invocation.id.to_string()),
        ("request", plain(&format!("{} {}", invocation.method, invocation.path))),
        ("state", invocation.state.as_str().to_owned()),
        ("failures", invocation.failures.to_string()),
    ];
    if let Some(message) = &invocation.message {
        fields.push(("message", plain(message)));
    }
    if let Some(url) = &invocation.callback {
        fields.push(("callback", plain(url)));
    }
    if let Some(answer) = &invocation.answer {
        fields.push(("status", answer.status.to_string()));
        fields.push(("body", plain(&answer.body)));
    }
    output::fields(&fields)
}
