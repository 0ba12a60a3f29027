//! `torpor webhook`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::event::{
    CreateWebhook, Delivery, DeliveryList, DisabledReason, EventKind, LastAttempt, NewWebhook,
    UpdateWebhook, Webhook as Kept, WebhookList,
};
use torpor_protocol::{DeliveryId, ErrorCode, WebhookId};

use super::parse_pair;
use super::removal::remove;
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Manage webhooks: URLs that events are posted to, signed and at least once.
///
/// What is sent is signed as Standard Webhooks has it. What is not answered with 2xx is tried again for a day.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor webhook create https://example.com/hook        prints the secret, this once\n  \
    torpor webhook create https://example.com/hook --type sandbox.failed --label team=blue\n  \
    torpor webhook test webhook-…\n  torpor webhook deliveries webhook-…"
)]
pub(super) struct Webhook {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Have events sent to a URL, and print the secret that signs them.
    Create {
        url: String,
        #[command(flatten)]
        wanted: Wanted,
        /// Print all about it as JSON.
        #[arg(long)]
        json: bool,
    },
    /// List them.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show all about one.
    #[command(visible_alias = "inspect")]
    Show {
        webhook: WebhookId,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Change one; what is not mentioned stays.
    Update {
        webhook: WebhookId,
        /// Another address.
        #[arg(long)]
        url: Option<String>,
        #[command(flatten)]
        wanted: Wanted,
        /// All types again.
        #[arg(long, conflicts_with = "types")]
        all_types: bool,
        /// Whatever labels something has.
        #[arg(long, conflicts_with = "labels")]
        no_labels: bool,
        /// Send again.
        #[arg(long, conflicts_with = "disable")]
        enable: bool,
        /// Send nothing.
        #[arg(long)]
        disable: bool,
    },
    /// Remove them, with what was to be sent.
    Rm {
        #[arg(required = true)]
        webhooks: Vec<WebhookId>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
    /// Send an event of the type webhook.test.
    Test { webhook: WebhookId },
    /// Give it another secret and print that. Both sign for a day.
    Rotate {
        webhook: WebhookId,
        /// Print all about it as JSON.
        #[arg(long)]
        json: bool,
    },
    /// List what was sent and what waits, newest first.
    Deliveries {
        webhook: WebhookId,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Send something once more, under the same webhook-id.
    Redeliver { webhook: WebhookId, delivery: DeliveryId },
}

#[derive(Debug, Args)]
struct Wanted {
    /// Only events of this type, such as sandbox.slept; may be given again [default: all].
    #[arg(id = "types", long = "type", visible_alias = "kind", value_name = "TYPE")]
    types: Vec<EventKind>,
    /// Only events of what has this label; may be given again.
    #[arg(id = "labels", short, long = "label", value_name = "KEY=VALUE", value_parser = parse_pair)]
    labels: Vec<(String, String)>,
}

fn route(webhook: &WebhookId) -> Route {
    Route::new("/v1/webhooks").part(webhook.as_str())
}

impl Webhook {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Create { url, wanted: Wanted { types, labels }, json } => {
                let body = CreateWebhook { url, types, labels: labels.into_iter().collect() };
                let made = client.post(&Route::new("/v1/webhooks"), &body).await?;
                told(&made, json)?;
            }
            Action::Ls { json } => {
                let list: WebhookList = client.list(&Route::new("/v1/webhooks")).await?;
                output::show(json, &list, || table(&list.webhooks, units::now_ms()))?;
            }
            Action::Show { webhook, json } => {
                let found: Kept = client.get(&route(&webhook)).await?;
                output::show(json, &found, || output::fields(&describe(&found)))?;
            }
            Action::Update { webhook, url, wanted, all_types, no_labels, enable, disable } => {
                let Wanted { types, labels } = wanted;
                let changes = UpdateWebhook {
                    url,
                    types: (all_types || !types.is_empty()).then_some(types),
                    labels: (no_labels || !labels.is_empty()).then(|| labels.into_iter().collect()),
                    enabled: (enable || disable).then_some(enable),
                };
                let changed: Kept = client.patch(&route(&webhook), &changes).await?;
                output::line(changed.id.as_str())?;
            }
            Action::Rm { webhooks, force } => {
                remove(client, &webhooks, route, force, ErrorCode::NotFound).await?;
            }
            Action::Test { webhook } => {
                let sent: Delivery = client.post(&route(&webhook).then("/test"), &()).await?;
                output::line(sent.id.as_str())?;
            }
            Action::Rotate { webhook, json } => {
                told(&client.post(&route(&webhook).then("/rotate"), &()).await?, json)?;
            }
            Action::Deliveries { webhook, json } => {
                let route = route(&webhook).then("/deliveries");
                let list: DeliveryList = client.list(&route).await?;
                output::show(json, &list, || sent(&list.deliveries, units::now_ms()))?;
            }
            Action::Redeliver { webhook, delivery } => {
                let route = route(&webhook).then("/deliveries").part(delivery.as_str());
                let again: Delivery = client.post(&route.then("/redeliver"), &()).await?;
                output::line(again.id.as_str())?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The secret, which is told once.
fn told(made: &NewWebhook, json: bool) -> Result<()> {
    output::show(json, made, || {
        let fields = [("id", made.webhook.id.to_string()), ("secret", plain(&made.secret))];
        output::fields(&fields)
    })
}

fn types(webhook: &Kept) -> String {
    let names: Vec<_> = webhook.types.iter().map(|kind| kind.as_str()).collect();
    if names.is_empty() { "all".to_owned() } else { names.join(",") }
}

fn state(webhook: &Kept) -> &'static str {
    match (webhook.enabled, webhook.disabled_reason) {
        (true, _) => "enabled",
        (false, None) => "disabled",
        (false, Some(DisabledReason::Gone)) => "gone",
    }
}

/// What came of an attempt, in a few words.
fn outcome(last: Option<&LastAttempt>) -> String {
    match last {
        None => "-".to_owned(),
        Some(LastAttempt { status: Some(status), .. }) => status.to_string(),
        Some(LastAttempt { error, .. }) => {
            output::cut(&plain(error.as_deref().unwrap_or("no answer")), 60)
        }
    }
}

fn table(webhooks: &[Kept], now_ms: u64) -> String {
    let row = |webhook: &Kept| {
        let tried = webhook.last.as_ref().map(|last| units::show_age(last.at_ms, now_ms));
        vec![
            webhook.id.to_string(),
            state(webhook).to_owned(),
            types(webhook),
            output::pairs(&webhook.labels),
            outcome(webhook.last.as_ref()),
            tried.unwrap_or_else(|| "-".to_owned()),
            plain(&webhook.url),
        ]
    };
    let header = ["ID", "STATE", "TYPES", "LABELS", "LAST", "AGO", "URL"];
    output::table(&header, webhooks.iter().map(row).collect())
}

fn describe(webhook: &Kept) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("id", webhook.id.to_string()),
        ("url", plain(&webhook.url)),
        ("state", state(webhook).to_owned()),
        ("types", types(webhook)),
    ];
    if !webhook.labels.is_empty() {
        fields.push(("labels", output::pairs(&webhook.labels)));
    }
    if let Some(last) = &webhook.last {
        fields.push(("last tried", units::show_time(last.at_ms)));
        fields.push(("answer", outcome(Some(last))));
        fields.push(("took", units::show_millis(last.took_ms as f64)));
    }
    fields.push(("created", units::show_time(webhook.created_at_ms)));
    fields
}

fn sent(deliveries: &[Delivery], now_ms: u64) -> String {
    let row = |delivery: &Delivery| {
        let next =
            delivery.next_at_ms.map(|at_ms| format!("in {}", units::show_age(now_ms, at_ms)));
        vec![
            delivery.id.to_string(),
            delivery.kind.to_string(),
            plain(&delivery.subject),
            delivery.state.as_str().to_owned(),
            delivery.attempts.to_string(),
            outcome(delivery.last.as_ref()),
            next.unwrap_or_else(|| "-".to_owned()),
            units::show_age(delivery.created_at_ms, now_ms),
        ]
    };
    let header = ["ID", "TYPE", "SUBJECT", "STATE", "TRIES", "LAST", "NEXT", "AGE"];
    output::table(&header, deliveries.iter().map(row).collect())
}
