//! What can be changed of a sandbox while it lives. It is not woken for that.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use torpor_protocol::api::{Resize, Standby, UpdateSandbox};
use torpor_protocol::{ErrorCode, Lifetime, Name, SandboxSpec};
use torpor_service::Service;
use torpor_service::calls;
use torpor_web::error::{ApiError, Result};

use super::super::extract::{Address, Body};
use super::super::gate::Named;
use super::super::info::SandboxInfo;
use super::super::request::{
    NetworkPolicy, ResourcesRequest, must_resolve, ports, present, unrestricted,
};

/// The most that Tensorlake gives one sandbox; a larger host may give all it has.
const CPUS_MAX: usize = 8;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct UpdateRequest {
    name: Option<Name>,
    exposed_ports: Option<Vec<u16>>,
    allow_unauthenticated_access: Option<bool>,
    auto_resume: Option<bool>,
    /// Left out: as it is; null: no restriction.
    #[serde(deserialize_with = "present")]
    network: Option<Option<NetworkPolicy>>,
    resources: Option<ResourcesRequest>,
}

pub(super) async fn update(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    address: Address,
    Body(asked): Body<UpdateRequest>,
) -> Result<Json<SandboxInfo>> {
    let status = sandbox.status();
    let update = asked.into_update(&status.spec)?;
    if update == UpdateSandbox::default() {
        return Err(ApiError::invalid("the body does not say what to change"));
    }
    if let Some(network) = &update.network {
        must_resolve(network).await?;
    }
    let resizes = update.resources.is_some();
    calls::update(&service, &sandbox, update).await.map_err(|error| match error.describe() {
        // Waiting would not make this host larger.
        body if resizes && body.code == ErrorCode::CapacityReached => {
            ApiError::invalid(body.message)
        }
        _ => error.into(),
    })?;
    Ok(Json(SandboxInfo::of(sandbox.status(), &address)))
}

impl UpdateRequest {
    fn into_update(self, now: &SandboxSpec) -> Result<UpdateSandbox> {
        if let Some(resources) = &self.resources {
            let resources = resize(resources, now)?;
            let resize = UpdateSandbox { resources: Some(resources), ..UpdateSandbox::default() };
            return if self.says_more() {
                Err(ApiError::invalid("resources can't be changed together with anything else"))
            } else {
                Ok(resize)
            };
        }
        let named = self.name.is_some() || now.name.is_some();
        if self.auto_resume == Some(false) && !named {
            return Err(ApiError::invalid("auto_resume: false needs a sandbox with a name"));
        }
        let (lifetime, idle_after_ms) = match (&self.name, &now.name) {
            (Some(_), None) => promoted(now),
            (Some(_) | None, Some(_)) | (None, None) => (None, None),
        };
        let standby = Standby { idle_after_ms, auto_wake: self.auto_resume, hooks: None };
        let network = match &self.network {
            None => None,
            Some(None) => Some(unrestricted(&now.network)),
            Some(Some(policy)) => Some(policy.instead_of(&now.network)?),
        };
        let access = self.exposed_ports.is_some() || self.allow_unauthenticated_access.is_some();
        let before = now.ports.clone().unwrap_or_default();
        let ports = ports(&before, self.exposed_ports, self.allow_unauthenticated_access)?;
        Ok(UpdateSandbox {
            name: self.name,
            lifetime,
            standby: Some(standby).filter(|standby| *standby != Standby::default()),
            network,
            ports: access.then_some(ports),
            ..UpdateSandbox::default()
        })
    }

    /// Besides the resources.
    fn says_more(&self) -> bool {
        self.name.is_some()
            || self.exposed_ports.is_some()
            || self.allow_unauthenticated_access.is_some()
            || self.auto_resume.is_some()
            || self.network.is_some()
    }
}

/// An idle sandbox without a name ends; with one it falls asleep after the same time.
fn promoted(now: &SandboxSpec) -> (Option<Lifetime>, Option<Option<u64>>) {
    let Some(idle_ms) = now.lifetime.expire_idle_ms else { return (None, None) };
    let lifetime = Lifetime { expire_idle_ms: None, ..now.lifetime };
    (Some(lifetime), Some(Some(idle_ms)))
}

fn resize(asked: &ResourcesRequest, now: &SandboxSpec) -> Result<Resize> {
    let resize = asked.to_resize()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = cores.max(CPUS_MAX);
    if resize.cpus.is_some_and(|cpus| cpus > most as f64) {
        return Err(ApiError::invalid(format!("cpus: a sandbox has at most {most} here")));
    }
    let has = now.resources.disk_mib;
    if resize.disk_mib.is_some_and(|asked| asked < has) {
        return Err(ApiError::invalid(format!("disk_mb: a disk can't shrink; it has {has}")));
    }
    Ok(resize)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use torpor_protocol::Network;

    use super::*;

    fn spec(changes: &Value) -> SandboxSpec {
        let mut spec = json!({
            "name": null, "image": "x", "image_id": "0".repeat(64), "resources": {},
            "lifetime": {"expire_idle_ms": 600_000}, "standby": {"idle_after_ms": null},
        });
        for (key, value) in changes.as_object().unwrap() {
            spec[key] = value.clone();
        }
        serde_json::from_value(spec).unwrap()
    }

    fn into_update(asked: &Value, now: &SandboxSpec) -> Result<UpdateSandbox> {
        serde_json::from_value::<UpdateRequest>(asked.clone()).unwrap().into_update(now)
    }

    #[test]
    fn a_name_makes_an_idle_end_an_idle_sleep() {
        let update = into_update(&json!({"name": "kept"}), &spec(&json!({}))).unwrap();
        assert_eq!(update.lifetime.unwrap().expire_idle_ms, None);
        assert_eq!(update.standby.unwrap().idle_after_ms, Some(Some(600_000)));
        let named = spec(&json!({"name": "old", "lifetime": {}}));
        let update = into_update(&json!({"name": "new"}), &named).unwrap();
        assert_eq!((update.lifetime, update.standby), (None, None));
    }

    #[test]
    fn a_network_is_kept_cleared_or_replaced() {
        let now = spec(&json!({"network": {"internet": false}}));
        assert_eq!(into_update(&json!({"exposed_ports": []}), &now).unwrap().network, None);
        let cleared = into_update(&json!({"network": null}), &now).unwrap();
        assert_eq!(cleared.network, Some(Network::default()));
        let replaced = into_update(&json!({"network": {"allow_out": ["1.1.1.1"]}}), &now).unwrap();
        assert_eq!(replaced.network.unwrap().allow.len(), 1);
    }

    #[test]
    fn resources_are_changed_alone_and_disks_do_not_shrink() {
        let now = spec(&json!({}));
        let asked = |resources: Value| json!({"resources": resources});
        let resized = into_update(&asked(json!({"memory_mb": 4096})), &now).unwrap();
        assert_eq!(resized.resources.unwrap().memory_mib, Some(4096));
        for wrong in [
            asked(json!({"cpus": 100_000})),
            asked(json!({"disk_mb": 1024})),
            json!({"resources": {"cpus": 2}, "name": "both"}),
        ] {
            assert!(into_update(&wrong, &now).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_a_sandbox_with_a_name_may_be_left_asleep() {
        let asked = json!({"auto_resume": false});
        assert!(into_update(&asked, &spec(&json!({}))).is_err());
        let named = into_update(&asked, &spec(&json!({"name": "kept"}))).unwrap();
        assert_eq!(named.standby.unwrap().auto_wake, Some(false));
        let both = json!({"auto_resume": false, "name": "kept"});
        assert!(into_update(&both, &spec(&json!({}))).is_ok());
    }
}
