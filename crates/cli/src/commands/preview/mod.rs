//! `torpor preview`

mod create;
mod token;

use std::collections::HashMap;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::hosting::{HostedService, ServiceList};
use torpor_protocol::preview::{Preview as Kept, PreviewList, PreviewTarget};
use torpor_protocol::{ErrorCode, Name, SandboxRef, Status};

use super::removal::remove;
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::units;

/// Manage previews: public or private addresses of ports in sandboxes.
///
/// The address stays the same while the sandbox sleeps (who comes wakes it), is renamed or gets another
/// server. A private one is opened by a token in the URL (browsers get a cookie for it), by the header
/// x-torpor-preview-token, or by an API key.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor preview create web 3000                   private, prints a URL with a token\n  \
    torpor preview create web 3000 --public --ttl 1h\n  \
    torpor preview create web 8080 --prefix my-app --cors https://app.example.com\n  \
    torpor preview token create web port-3000 --ttl 10m"
)]
pub(super) struct Preview {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(create::Create),
    /// List previews, of one sandbox or of all.
    Ls {
        /// Name or id of the sandbox.
        sandbox: Option<SandboxRef>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show details of a preview.
    #[command(visible_alias = "inspect")]
    Show {
        #[command(flatten)]
        which: Which,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove previews with their tokens; open connections are cut off.
    Rm {
        /// Name or id of the sandbox.
        sandbox: SandboxRef,
        /// Names of the previews.
        #[arg(required = true)]
        previews: Vec<Name>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
    /// Manage access tokens of a private preview.
    #[command(subcommand)]
    Token(token::Token),
}

/// Which preview is meant.
#[derive(Debug, Args)]
struct Which {
    /// Name or id of the sandbox.
    sandbox: SandboxRef,
    /// Name of the preview.
    preview: Name,
}

impl Which {
    fn route(&self) -> Route {
        route(&self.sandbox).part(self.preview.as_str())
    }

    fn not_found(&self, error: torpor_client::Error) -> Error {
        not_found(error.into(), &self.sandbox)
    }
}

/// `/v1/sandboxes/{sandbox}/previews`
fn route(sandbox: &SandboxRef) -> Route {
    Route::sandbox(sandbox).then("/previews")
}

impl Preview {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Create(verb) => verb.run(client).await?,
            Action::Ls { sandbox, json } => list(client, sandbox.as_ref(), json).await?,
            Action::Show { which, json } => {
                let found = client.get(&which.route()).await;
                let found: Kept = found.map_err(|error| which.not_found(error))?;
                output::show(json, &found, || output::fields(&describe(&found)))?;
            }
            Action::Rm { sandbox, previews, force } => {
                let route = |preview: &Name| route(&sandbox).part(preview.as_str());
                let removed = remove(client, &previews, route, force, ErrorCode::NotFound).await;
                removed.map_err(|error| not_found(error, &sandbox))?;
            }
            Action::Token(verb) => verb.run(client).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn list(client: &Client, sandbox: Option<&SandboxRef>, json: bool) -> Result<()> {
    let route = sandbox.map_or_else(|| Route::new("/v1/previews"), route);
    let list: PreviewList = client.list(&route).await?;
    if json {
        return output::json(&list);
    }
    let names = names(client, sandbox, &list).await?;
    output::print(&table(&list.previews, &names, units::now_ms()))
}

/// What the sandboxes and services are called, for people.
async fn names(
    client: &Client,
    sandbox: Option<&SandboxRef>,
    list: &PreviewList,
) -> Result<HashMap<PreviewTarget, String>> {
    if let Some(sandbox) = sandbox {
        let name = |preview: &Kept| (preview.target.clone(), sandbox.to_string());
        return Ok(list.previews.iter().map(name).collect());
    }
    let all = if list.previews.is_empty() {
        Vec::new()
    } else {
        client.sandboxes::<Status>(&[], None).await?
    };
    let named = all.into_iter().filter_map(|status| {
        Some((PreviewTarget::Sandbox(status.id), status.spec.name?.to_string()))
    });
    let mut names: HashMap<_, _> = named.collect();
    if list.previews.iter().any(|preview| matches!(preview.target, PreviewTarget::Service(_))) {
        let services: ServiceList = client.list(&Route::new("/v1/services")).await?;
        let name =
            |it: HostedService| (PreviewTarget::Service(it.id), format!("service:{}", it.name));
        names.extend(services.services.into_iter().map(name));
    }
    Ok(names)
}

/// Says where to look for what was meant.
fn not_found(error: Error, sandbox: &SandboxRef) -> Error {
    error.with_hint(ErrorCode::NotFound, &format!("list them with: torpor preview ls {sandbox}"))
}

fn id(preview: &Kept) -> &str {
    match &preview.target {
        PreviewTarget::Sandbox(id) => id.as_str(),
        PreviewTarget::Service(id) => id.as_str(),
    }
}

fn access(preview: &Kept) -> &'static str {
    if preview.public { "public" } else { "private" }
}

fn table(previews: &[Kept], names: &HashMap<PreviewTarget, String>, now_ms: u64) -> String {
    let row = |preview: &Kept| {
        let sandbox = names.get(&preview.target).map_or(id(preview), String::as_str);
        let ends = preview.expires_at_ms.map(|end| format!("in {}", units::show_age(now_ms, end)));
        vec![
            plain(sandbox),
            preview.name.to_string(),
            preview.port.to_string(),
            access(preview).to_owned(),
            ends.unwrap_or_else(|| "never".to_owned()),
            preview.urls.first().map(|url| plain(url)).unwrap_or_default(),
        ]
    };
    let header = ["SANDBOX", "NAME", "PORT", "ACCESS", "ENDS", "URL"];
    output::table(&header, previews.iter().map(row).collect())
}

fn describe(preview: &Kept) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("name", preview.name.to_string()),
        ("id", preview.id.to_string()),
        match &preview.target {
            PreviewTarget::Sandbox(id) => ("sandbox", id.to_string()),
            PreviewTarget::Service(id) => ("service", id.to_string()),
        },
        ("port", preview.port.to_string()),
        ("access", access(preview).to_owned()),
    ];
    fields.extend(preview.urls.iter().map(|url| ("url", plain(url))));
    if let Some(end) = preview.expires_at_ms {
        fields.push(("ends", units::show_time(end)));
    }
    let rule = |(name, value): (&String, &String)| plain(&format!("{name}: {value}"));
    fields.extend(preview.request_headers.iter().map(|pair| ("request header", rule(pair))));
    fields.extend(preview.response_headers.iter().map(|pair| ("response header", rule(pair))));
    if !preview.cors.is_empty() {
        fields.push(("cors", plain(&preview.cors.join(", "))));
    }
    if preview.keep_open {
        fields.push(("keep open", "while the sandbox sleeps".to_owned()));
    }
    fields.push(("created", units::show_time(preview.created_at_ms)));
    fields
}
