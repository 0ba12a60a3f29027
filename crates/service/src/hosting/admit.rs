//! From what is asked for to a service and a revision that can be: checked whole, before anything is recorded.

use std::num::NonZeroU16;

use torpor_protocol::api::{CreateSandbox, Standby};
use torpor_protocol::hosting::{
    Deploy, Health, INSTANCE_LABEL, REVISION_LABEL, Revision, RevisionState, SERVICE_LABEL, Scale,
    Sticky,
};
use torpor_protocol::spec::Pairs;
use torpor_protocol::{PortAccess, SandboxSpec, ServiceId, SnapshotKind};

use super::traffic;
use crate::Service;
use crate::calls;
use crate::error::{Error, Result};
use crate::pinned_save::{PinnedSave, parse};

/// Longest path of a check, and longest name of what is sticky.
const PATH_MAX: usize = 1024;
const STICKY_MAX: usize = 256;
/// Tells a program where to listen, as everywhere.
const PORT: &str = "PORT";

pub(super) fn check_scale(scale: &Scale) -> Result<()> {
    let Scale { min, max, concurrency, idle_after_ms: _ } = *scale;
    if !(1..=Scale::MAX_LIMIT).contains(&max) || min > max {
        let limit = Scale::MAX_LIMIT;
        return Err(Error::invalid(format!("max is from 1 to {limit}, and min at most max")));
    }
    if !(1..=Scale::CONCURRENCY_LIMIT).contains(&concurrency) {
        let limit = Scale::CONCURRENCY_LIMIT;
        return Err(Error::invalid(format!("concurrency is from 1 to {limit}")));
    }
    Ok(())
}

pub(super) fn check_sticky(sticky: &Sticky) -> Result<()> {
    let (Sticky::Header(name) | Sticky::Cookie(name)) = sticky;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > STICKY_MAX || !name.bytes().all(plain) {
        return Err(Error::invalid("sticky: it is the name of a header or of a cookie"));
    }
    Ok(())
}

fn check_health(health: &Health) -> Result<()> {
    if !(1..=Health::TIMEOUT_MAX_MS).contains(&health.timeout_ms) {
        let limit = Health::TIMEOUT_MAX_MS;
        return Err(Error::invalid(format!("health: timeout_ms is from 1 to {limit}")));
    }
    let Some(path) = &health.path else { return Ok(()) };
    if !path.starts_with('/')
        || path.len() > PATH_MAX
        || !path.bytes().all(|b| b.is_ascii_graphic())
    {
        return Err(Error::invalid(
            "health: path begins with '/' and has letters, digits and signs",
        ));
    }
    Ok(())
}

/// The revision of that number, which begins now.
pub(super) async fn revision(app: &Service, number: u32, deploy: Deploy) -> Result<Revision> {
    check_health(&deploy.health)?;
    deploy.tag.as_ref().map_or(Ok(()), traffic::check_tag)?;
    let (spec, from) = match (&deploy.snapshot, &deploy.image) {
        (Some(_), Some(_)) => return Err(Error::invalid("image and snapshot: one of them")),
        (Some(snapshot), None) => {
            let point = memory_point(app, snapshot, &deploy).await?;
            let spec = point.admit(app, wish(&deploy))?;
            (spec, point.snapshot.clone())
        }
        (None, Some(_)) => (calls::admit(app, wish(&deploy)).await?, None),
        (None, None) => {
            return Err(Error::invalid("image: a revision is of an image, or of a snapshot"));
        }
    };
    calls::know(app, &spec).await?;
    let config = app.images.inspect(spec.image_id.as_str()).await?.config;
    let command = match (&from, deploy.command.is_empty()) {
        // What is to run runs in it already.
        (Some(_), _) | (None, false) => deploy.command,
        (None, true) => [config.entrypoint, config.cmd].concat(),
    };
    if command.is_empty() && from.is_none() {
        return Err(Error::invalid(format!(
            "command: the image {} says none, so the deploy must",
            spec.image
        )));
    }
    let port = deploy.port.or_else(|| exposed(&config.exposed)).ok_or_else(|| {
        Error::invalid(
            "port: the image exposes none (EXPOSE), so the deploy must say where it listens",
        )
    })?;
    let SandboxSpec { image, image_id, mut env, resources, network, secrets, engine, .. } = spec;
    env.entry(PORT.to_owned()).or_insert_with(|| port.to_string());
    Ok(Revision {
        number,
        state: RevisionState::Starting,
        image,
        image_id,
        command,
        port,
        env,
        secrets,
        health: deploy.health,
        resources,
        network,
        engine,
        from,
        snapshot: None,
        no_snapshot: deploy.no_snapshot,
        no_traffic: deploy.no_traffic,
        tag: deploy.tag,
        message: None,
        log: Vec::new(),
        created_at_ms: app.fleet.clock().now_ms(),
        settled_at_ms: None,
    })
}

/// What the deploy asks of a sandbox.
fn wish(deploy: &Deploy) -> CreateSandbox {
    CreateSandbox {
        image: deploy.image.clone(),
        pull: deploy.pull,
        engine: deploy.engine.clone(),
        cpus: deploy.cpus,
        memory_mib: deploy.memory_mib,
        disk_mib: deploy.disk_mib,
        env: deploy.env.clone(),
        network: deploy.network.clone(),
        secrets: deploy.secrets.clone(),
        ..CreateSandbox::default()
    }
}

async fn memory_point(app: &Service, snapshot: &str, deploy: &Deploy) -> Result<PinnedSave> {
    let point = PinnedSave::of(app, &parse(snapshot)?).await?;
    let why = match point.about().kind {
        SnapshotKind::Filesystem => "this one has files only: make an image of it",
        SnapshotKind::Memory if !point.about().spec.mounts().is_empty() => {
            "this one was taken with volumes"
        }
        SnapshotKind::Memory if !deploy.secrets.is_empty() => {
            "its secrets are those it was taken with"
        }
        SnapshotKind::Memory => return Ok(point),
    };
    Err(Error::invalid(format!(
        "snapshot: a revision begins from a memory snapshot without volumes; {why}"
    )))
}

/// The first port of an image, such as `8080/tcp`.
fn exposed(ports: &[String]) -> Option<NonZeroU16> {
    let tcp = |text: &String| {
        let (port, kind) = text.split_once('/').unwrap_or((text, "tcp"));
        port.parse().ok().filter(|_| kind == "tcp")
    };
    ports.iter().find_map(tcp)
}

/// Under which key an instance is made: nobody else makes one under it.
pub(super) fn key(service: &ServiceId, revision: u32, instance: &str) -> String {
    format!("instance-{service}-{revision}-{instance}")
}

/// What says of a sandbox that it is an instance.
pub(super) fn labels(service: &ServiceId, revision: u32, instance: &str) -> Pairs {
    Pairs::from([
        (INSTANCE_LABEL.to_owned(), instance.to_owned()),
        (SERVICE_LABEL.to_owned(), service.to_string()),
        (REVISION_LABEL.to_owned(), revision.to_string()),
    ])
}

/// How an instance sleeps.
pub(super) fn standby(scale: &Scale) -> Standby {
    let idle = Some(scale.idle_after_ms).filter(|ms| *ms > 0);
    Standby { idle_after_ms: Some(idle), ..Standby::default() }
}

/// What an instance from the image is asked to be. Its ports are reached through the service only.
pub(super) fn instance(revision: &Revision, scale: &Scale) -> CreateSandbox {
    CreateSandbox {
        image: Some(revision.image_id.to_string()),
        engine: revision.engine.clone(),
        cpus: Some(revision.resources.cpus),
        memory_mib: Some(revision.resources.memory_mib),
        disk_mib: Some(revision.resources.disk_mib),
        pids: Some(revision.resources.pids),
        env: revision.env.clone(),
        network: revision.network.clone(),
        standby: standby(scale),
        secrets: revision.secrets.clone(),
        ports: Some(PortAccess::default()),
        ..CreateSandbox::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_tcp_port_of_an_image_is_where_it_listens() {
        let port = |ports: &[&str]| {
            let ports: Vec<_> = ports.iter().map(|port| (*port).to_owned()).collect();
            exposed(&ports).map(NonZeroU16::get)
        };
        assert_eq!(port(&["53/udp", "8080/tcp", "9090/tcp"]), Some(8080));
        assert_eq!((port(&["3000"]), port(&["x"]), port(&["0/tcp"])), (Some(3000), None, None));
    }

    #[test]
    fn scales_and_checks_that_can_not_be_are_refused() {
        for (min, max, concurrency) in [(0, 0, 1), (2, 1, 1), (0, 101, 1), (0, 1, 0), (0, 1, 1001)]
        {
            let scale = Scale { min, max, concurrency, ..Scale::default() };
            assert!(check_scale(&scale).is_err(), "{scale:?}");
        }
        check_scale(&Scale::default()).unwrap();
        for path in ["health", "/a b", "/a\r\nx: y", ""] {
            let health = Health { path: Some(path.to_owned()), ..Health::default() };
            assert!(check_health(&health).is_err(), "{path:?}");
        }
        assert!(check_sticky(&Sticky::Cookie("a;b".to_owned())).is_err());
        check_sticky(&Sticky::Header("x-user".to_owned())).unwrap();
    }
}
