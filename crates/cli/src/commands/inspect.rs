//! `torpor inspect`, and how a sandbox is described to people.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::{ArchivedSandbox, UsageReport};
use torpor_protocol::{
    ErrorCode, Lifetime, Name, Network, NetworkLimits, PortAccess, SandboxRef, SandboxSpec,
    StandbyPolicy, State, Status,
};

use super::{ended, sandboxes};
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// A command that is longer is cut.
const COMMAND_WIDTH: usize = 100;

type Fields = Vec<(&'static str, String)>;

/// Show details of a sandbox, also of one that is gone (by its id).
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
        match client.get::<Status>(&Route::sandbox(&self.sandbox)).await {
            Ok(status) => self.living(client, &status).await?,
            Err(error) => match self.find_ended(client, &error).await? {
                Some(ended) if self.json => output::json(&ended)?,
                Some(ended) => output::print(&output::fields(&describe_ended(&ended)))?,
                None => return Err(error.into()),
            },
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn living(&self, client: &Client, status: &Status) -> Result<()> {
        if self.json {
            return output::json(status);
        }
        let mut fields = describe(status);
        if status.state == State::Running {
            // What it uses is an extra: it may have ended a moment ago.
            let usage = client.get(&Route::sandbox(&self.sandbox).then("/usage")).await;
            fields.extend(usage.iter().flat_map(describe_usage));
        }
        output::print(&output::fields(&fields))
    }

    /// An id means the same for ever; a name means who has it now.
    async fn find_ended(
        &self,
        client: &Client,
        error: &torpor_client::Error,
    ) -> Result<Option<ArchivedSandbox>> {
        match &self.sandbox {
            SandboxRef::Id(id) if error.code() == Some(ErrorCode::SandboxNotFound) => {
                ended::find(client, id).await
            }
            SandboxRef::Id(_) | SandboxRef::Name(_) => Ok(None),
        }
    }
}

fn describe(status: &Status) -> Fields {
    let spec = &status.spec;
    let mut fields = vec![
        ("id", status.id.to_string()),
        ("name", show_name(spec.name.as_ref())),
        ("state", sandboxes::show_status(status)),
    ];
    if let Some(message) = &status.message {
        fields.push(("reason", plain(message)));
    }
    fields.extend(describe_spec(spec));
    fields.extend([
        ("engine", plain(status.spec.engine.as_deref().unwrap_or_default())),
        ("created", units::show_time(status.created_at_ms)),
        ("last used", units::show_time(status.last_used_at_ms)),
        ("sleeps", describe_sleep(&spec.standby)),
        ("wakes", status.wakes.to_string()),
        ("ends", describe_end(&spec.lifetime)),
    ]);
    fields.extend(describe_past(status));
    fields
}

fn describe_ended(ended: &ArchivedSandbox) -> Fields {
    let mut fields = vec![
        ("id", ended.id.to_string()),
        ("name", show_name(ended.spec.name.as_ref())),
        ("state", State::Terminated.as_str().to_owned()),
    ];
    if let Some(reason) = ended.reason {
        fields.push(("reason", reason.to_string()));
    }
    fields.extend(describe_spec(&ended.spec));
    fields.extend([
        ("created", units::show_time(ended.created_at_ms)),
        ("ended", units::show_time(ended.ended_at_ms)),
    ]);
    fields
}

fn show_name(name: Option<&Name>) -> String {
    name.map_or_else(|| "-".to_owned(), ToString::to_string)
}

/// What it was asked to be; what is rarely asked for is shown only then.
fn describe_spec(spec: &SandboxSpec) -> Fields {
    let resources = &spec.resources;
    let mut fields = vec![
        ("image", format!("{} ({})", plain(&spec.image), output::cut(spec.image_id.as_str(), 13))),
        ("cpus", resources.cpus.to_string()),
        ("memory", units::show_mib(resources.memory_mib)),
        ("disk", units::show_mib(resources.disk_mib)),
        ("internet", describe_reach(&spec.network)),
    ];
    fields.extend(describe_way_out(&spec.network));
    fields.extend([
        ("labels", output::pairs(&spec.labels)),
        ("environment", output::pairs(&spec.env)),
    ]);
    if !spec.secrets.is_empty() {
        fields.push(("secrets", listed(&spec.secrets)));
    }
    for mount in spec.mounts() {
        let (at, below) = (plain(mount.path.as_str()), plain(mount.subpath.relative()));
        let below = if below.is_empty() { below } else { format!(":/{below}") };
        let ro = if mount.read_only { ", to read" } else { "" };
        fields.push(("mount", format!("{} {}{below} at {at}{ro}", mount.kind, mount.name)));
    }
    if let Some(ports) = &spec.ports {
        fields.push(("ports", describe_ports(ports)));
    }
    if !spec.entrypoint.is_empty() {
        fields.push(("entrypoint", describe_command(&spec.entrypoint)));
    }
    if let Some(pool) = &spec.pool {
        fields.push(("pool", pool.to_string()));
    }
    fields
}

fn listed(things: &[impl ToString]) -> String {
    things.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

pub(super) fn describe_command(command: &[String]) -> String {
    output::command_line(command, COMMAND_WIDTH)
}

pub(super) fn describe_reach(network: &Network) -> String {
    let reach = match (&network.allow[..], network.internet) {
        ([], true) => "yes".to_owned(),
        ([], false) => "no".to_owned(),
        (allow, _) => format!("only {}", listed(allow)),
    };
    match &network.deny[..] {
        [] => reach,
        deny => format!("{reach}, never {}", listed(deny)),
    }
}

/// What is put into its requests, through what they leave, and how wide that is: where something was
/// asked for.
fn describe_way_out(network: &Network) -> Fields {
    let mut fields: Fields =
        network.routes.iter().map(|route| ("route", describe_route(route))).collect();
    if !network.secrets.is_empty() {
        fields.push(("placeholders", listed(&network.secrets)));
    }
    if let Some(gateway) = &network.gateway {
        fields.push(("gateway", gateway.to_string()));
    }
    let NetworkLimits { bytes_per_sec, connections_per_sec, connections } = network.limits;
    let limits = [
        bytes_per_sec.map(|bytes| format!("{}/s", units::show_bytes(bytes))),
        connections.map(|most| format!("{most} connections")),
        connections_per_sec.map(|most| format!("{most} new connections/s")),
    ];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    if !limits.is_empty() {
        fields.push(("limits", limits.join(", ")));
    }
    fields
}

fn describe_route(route: &torpor_protocol::Route) -> String {
    let mut what = route.methods.join(",");
    if !what.is_empty() {
        what.push(' ');
    }
    what.push_str(&listed(&route.hosts));
    if !route.paths.is_empty() {
        what.push_str(&format!(" below {}", route.paths.join(", ")));
    }
    let puts = [("header", &route.headers), ("body", &route.body), ("query", &route.query)];
    for (place, pairs) in puts {
        for (name, value) in pairs {
            what.push_str(&format!("; {place} {name}={value}"));
        }
    }
    plain(&what)
}

fn describe_ports(ports: &PortAccess) -> String {
    match (&ports.exposed[..], ports.public) {
        ([], _) => "none".to_owned(),
        (exposed, true) => format!("{}, for everybody", listed(exposed)),
        (exposed, false) => listed(exposed),
    }
}

pub(super) fn describe_sleep(policy: &StandbyPolicy) -> String {
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
fn describe_past(status: &Status) -> Fields {
    let mut fields = Vec::new();
    if status.state == State::Asleep {
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
            fields.push((name, describe_command(hook)));
        }
    }
    fields
}

pub(super) fn describe_end(lifetime: &Lifetime) -> String {
    let show = |ms: u64| units::show_duration(Duration::from_millis(ms));
    let mut ends = Vec::new();
    if let Some(age) = lifetime.max_age_ms {
        ends.push(format!("{} after its creation", show(age)));
    }
    if let Some(idle) = lifetime.expire_idle_ms {
        ends.push(format!("{} after its last use", show(idle)));
    }
    if let Some(at_ms) = lifetime.expires_at_ms {
        ends.push(format!("at {}", units::show_time(at_ms)));
    }
    if ends.is_empty() { "when it is removed".to_owned() } else { ends.join(", or ") }
}

fn describe_usage(usage: &UsageReport) -> Fields {
    vec![
        ("memory used", units::show_bytes(usage.memory_bytes)),
        ("disk used", units::show_bytes(usage.disk_bytes)),
        ("cpu used", units::show_duration(Duration::from_millis(usage.cpu_ms))),
        ("out of memory", format!("{} times", usage.oom_kills)),
    ]
}
