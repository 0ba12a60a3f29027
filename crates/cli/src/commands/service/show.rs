//! Services for people.

use torpor_protocol::hosting::{HostedService, Revision, Sticky};

use crate::commands::inspect;
use crate::output::{self, plain};
use crate::units;

pub(super) fn services(services: &[HostedService]) -> String {
    let row = |service: &HostedService| {
        let awake = service.instances.iter().filter(|it| it.state.as_str() == "running").count();
        vec![
            service.name.to_string(),
            shares(service),
            format!("{awake}/{}", service.instances.len()),
            access(service).to_owned(),
            service.revisions.first().map(|it| it.state.as_str().to_owned()).unwrap_or_default(),
            service.urls.first().map(|url| plain(url)).unwrap_or_default(),
        ]
    };
    let header = ["NAME", "TRAFFIC", "AWAKE", "ACCESS", "LAST DEPLOY", "URL"];
    output::table(&header, services.iter().map(row).collect())
}

fn access(service: &HostedService) -> &'static str {
    if service.public { "public" } else { "private" }
}

/// Such as `3: 80%, 4: 20%`.
fn shares(service: &HostedService) -> String {
    let shares = service.traffic.iter().filter(|share| share.percent > 0);
    let shares: Vec<_> =
        shares.map(|share| format!("{}: {}%", share.revision, share.percent)).collect();
    if shares.is_empty() { "-".to_owned() } else { shares.join(", ") }
}

pub(super) fn describe(service: &HostedService) -> String {
    let scale = &service.scale;
    let idle = Some(scale.idle_after_ms).filter(|ms| *ms > 0);
    let idle = idle.map(|ms| units::show_duration(std::time::Duration::from_millis(ms)));
    let mut fields = vec![("name", service.name.to_string()), ("id", service.id.to_string())];
    fields.extend(service.urls.iter().map(|url| ("url", plain(url))));
    fields.extend([
        ("access", access(service).to_owned()),
        ("instances", format!("{} to {}", scale.min, scale.max)),
        ("concurrency", scale.concurrency.to_string()),
        ("sleeps", idle.map_or_else(|| "never".to_owned(), |idle| format!("after {idle}"))),
    ]);
    match &service.sticky {
        Some(Sticky::Header(name)) => fields.push(("sticky", format!("by header {}", plain(name)))),
        Some(Sticky::Cookie(name)) => fields.push(("sticky", format!("by cookie {}", plain(name)))),
        None => {}
    }
    fields.push(("created", units::show_time(service.created_at_ms)));
    let parts = [output::fields(&fields), traffic(service), revisions(service), instances(service)];
    parts.join("\n")
}

pub(super) fn traffic(service: &HostedService) -> String {
    let rows = service.traffic.iter().map(|share| {
        vec![
            share.revision.to_string(),
            format!("{}%", share.percent),
            share.tag.as_ref().map(ToString::to_string).unwrap_or_default(),
            share.urls.first().map(|url| plain(url)).unwrap_or_default(),
        ]
    });
    output::table(&["REVISION", "TRAFFIC", "TAG", "URL"], rows.collect())
}

pub(super) fn revisions(service: &HostedService) -> String {
    let now_ms = units::now_ms();
    let row = |revision: &Revision| {
        let share = service.traffic.iter().find(|share| share.revision == revision.number);
        vec![
            revision.number.to_string(),
            revision.state.as_str().to_owned(),
            share.map(|share| format!("{}%", share.percent)).unwrap_or_default(),
            revision.port.to_string(),
            output::cut(&plain(&revision.image), 24),
            output::cut(&inspect::describe_command(&revision.command), 32),
            units::show_age(revision.created_at_ms, now_ms),
            revision.message.as_deref().map(plain).unwrap_or_default(),
        ]
    };
    let header = ["REVISION", "STATE", "TRAFFIC", "PORT", "IMAGE", "COMMAND", "AGE", "MESSAGE"];
    output::table(&header, service.revisions.iter().map(row).collect())
}

fn instances(service: &HostedService) -> String {
    let rows = service.instances.iter().map(|instance| {
        let state = match instance.tier {
            Some(tier) => format!("{} ({})", instance.state.as_str(), tier.as_str()),
            None => instance.state.as_str().to_owned(),
        };
        vec![
            instance.sandbox.to_string(),
            instance.revision.to_string(),
            state,
            if instance.ready { "yes" } else { "no" }.to_owned(),
            instance.requests.to_string(),
        ]
    });
    output::table(&["INSTANCE", "REVISION", "STATE", "READY", "REQUESTS"], rows.collect())
}
