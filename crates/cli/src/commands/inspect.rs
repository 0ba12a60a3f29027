//! `torpor inspect`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use torpor_protocol::api::UsageReport;
use torpor_protocol::{SandboxRef, StandbyPolicy, State, Status};

use super::sandboxes;
use crate::client::{Client, Route};
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// A hook that is longer is cut.
const HOOK_WIDTH: usize = 100;

/// Show all about a sandbox.
#[derive(Debug, Args)]
pub(super) struct Inspect {
    /// Name or id.
    sandbox: SandboxRef,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let status: Status = client.get(&Route::sandbox(&self.sandbox)).await?;
        if self.json {
            output::json(&status)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut fields = describe(&status);
        if status.state == State::Running {
            // What it uses is an extra: it may have ended a moment ago.
            let usage = client.get(&Route::sandbox(&self.sandbox).then("/usage")).await;
            fields.extend(usage.iter().flat_map(describe_usage));
        }
        output::print(&output::fields(&fields))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn describe(status: &Status) -> Vec<(&'static str, String)> {
    let spec = &status.spec;
    let resources = &spec.resources;
    let mut fields = vec![
        ("id", status.id.to_string()),
        ("name", spec.name.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string)),
        ("state", sandboxes::show_state(status.state, status.tier)),
        ("image", format!("{} ({})", plain(&spec.image), output::cut(spec.image_id.as_str(), 13))),
        ("engine", plain(&status.engine)),
        ("cpus", resources.cpus.to_string()),
        ("memory", units::show_mib(resources.memory_mib)),
        ("disk", units::show_mib(resources.disk_mib)),
        ("internet", if spec.network.internet { "yes" } else { "no" }.to_owned()),
        ("labels", output::pairs(&spec.labels)),
        ("environment", output::pairs(&spec.env)),
        ("created", units::show_time(status.created_at_ms)),
        ("last used", units::show_time(status.last_used_at_ms)),
        ("sleeps", describe_sleep(&spec.standby)),
        ("wakes", status.wakes.to_string()),
        ("ends", describe_end(status)),
    ];
    if let Some(reason) = &status.reason {
        fields.insert(3, ("reason", plain(reason)));
    }
    fields.extend(describe_past(status));
    fields
}

fn describe_sleep(policy: &StandbyPolicy) -> String {
    let idle = match policy.idle_after_ms {
        0 => "when asked to".to_owned(),
        millis => {
            format!("{} after its last use", units::show_duration(Duration::from_millis(millis)))
        }
    };
    let wake = if policy.auto_wake { "wakes at a request" } else { "is woken by hand only" };
    format!("{idle}; {wake}")
}

/// What became of it so far, where there is something to say.
fn describe_past(status: &Status) -> Vec<(&'static str, String)> {
    let mut fields = Vec::new();
    if status.state == State::Standby {
        let durable = if status.durable { "yes" } else { "not yet" };
        fields.push(("on disk", durable.to_owned()));
    }
    if let Some(parent) = &status.parent {
        fields.push(("parent", parent.to_string()));
    }
    if let Some(then) = status.recovered_from_ms {
        let text = format!("as it was at {}; its machine was lost", units::show_time(then));
        fields.push(("recovered", text));
    }
    let hooks = &status.spec.standby.hooks;
    for (name, hook) in [("before sleep", &hooks.before_sleep), ("after wake", &hooks.after_wake)] {
        if !hook.is_empty() {
            fields.push((name, output::command_line(hook, HOOK_WIDTH)));
        }
    }
    fields
}

fn describe_end(status: &Status) -> String {
    let lifetime = &status.spec.lifetime;
    let show = |seconds: u64| units::show_duration(Duration::from_secs(seconds));
    let mut ends = Vec::new();
    if let Some(age) = lifetime.max_age_secs {
        ends.push(format!("{} after its creation", show(age)));
    }
    if let Some(idle) = lifetime.expire_idle_secs {
        ends.push(format!("{} after its last use", show(idle)));
    }
    if let Some(at) = lifetime.expire_at {
        ends.push(format!("at {}", units::show_time(at.saturating_mul(1000))));
    }
    if ends.is_empty() { "when it is removed".to_owned() } else { ends.join(", or ") }
}

fn describe_usage(usage: &UsageReport) -> Vec<(&'static str, String)> {
    vec![
        ("memory used", units::show_bytes(usage.memory_bytes)),
        ("disk used", units::show_bytes(usage.disk_bytes)),
        ("cpu used", units::show_duration(Duration::from_micros(usage.cpu_micros))),
        ("out of memory", format!("{} times", usage.oom_kills)),
    ]
}
