//! Sandboxes: create, list, get, update, delete.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use tokio::time::Instant;
use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{Fleet, Sandbox};
use torpor_protocol::api::{CreateSandbox, SandboxList, UpdateSandbox, UsageReport};
use torpor_protocol::snapshot::{SandboxUsage, UsageList};
use torpor_protocol::{SandboxId, State as SandboxState, Status};
use torpor_service::Service;
use torpor_service::calls::{self, Unanswered};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Named, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::idempotency::RepeatKey;
use super::page::{Cut, PageQuery};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get, update, delete))
        .routes(routes!(usage))
        .routes(routes!(usages))
}

/// For what takes a while and can be looked at meanwhile.
#[derive(Debug, serde::Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WaitQuery {
    /// Answer when it is done (default), or at once with 202.
    #[serde(default = "WaitQuery::waits")]
    #[param(required = false)]
    pub(super) wait: bool,
}

impl WaitQuery {
    fn waits() -> bool {
        true
    }
}

/// Create a sandbox.
#[utoipa::path(
    post, path = "/v1/sandboxes", params(WaitQuery), request_body = CreateSandbox,
    responses(
        (status = 201, description = "It runs.", body = Status),
        (status = 202, description = "It will run (`wait=false`).", body = Status),
    )
)]
async fn create(
    State(service): State<Arc<Service>>,
    Query(WaitQuery { wait }): Query<WaitQuery>,
    RepeatKey(by): RepeatKey,
    request: Option<Json<CreateSandbox>>,
) -> Result<Response> {
    let begun = Instant::now();
    let request = request.map(|Json(request)| request).unwrap_or_default();
    let sandbox = calls::create(&service, request, by.as_deref()).await?;
    if !wait {
        return Ok(with_status(StatusCode::ACCEPTED, sandbox.status()));
    }
    let unanswered = Unanswered::new(&sandbox);
    calls::started(&service, &sandbox, begun).await?;
    unanswered.answered();
    Ok(with_status(StatusCode::CREATED, sandbox.status()))
}

/// What a listing is asked for. `label` may be repeated: all must match.
#[derive(Debug, Default, PartialEq, IntoParams)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// `key=value`; may be repeated.
    label: Vec<String>,
    #[param(inline)]
    state: Option<SandboxState>,
    /// 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

impl ListQuery {
    fn parse(pairs: Vec<(String, String)>) -> Result<Self> {
        let mut query = Self::default();
        for (key, value) in pairs {
            let bad = || ApiError::invalid(format!("{key}={value:.80} can't be read"));
            match key.as_str() {
                "label" if value.contains('=') => query.label.push(value),
                "state" => {
                    let state = SandboxState::ALL.into_iter().find(|s| s.as_str() == value);
                    query.state = Some(state.ok_or_else(bad)?);
                }
                "cursor" => query.cursor = Some(value),
                "limit" => query.limit = Some(value.parse().map_err(|_| bad())?),
                _ => return Err(bad()),
            }
        }
        Ok(query)
    }

    fn admits(&self, status: &Status) -> bool {
        self.state.is_none_or(|state| status.state == state)
            && self
                .label
                .iter()
                .filter_map(|label| label.split_once('='))
                .all(|(key, value)| status.spec.labels.get(key).is_some_and(|has| has == value))
    }

    fn page(&self, fleet: &Fleet) -> Result<SandboxList> {
        let cut = Cut::new(self.limit, self.cursor.clone())?;
        let after: Option<SandboxId> = cut.parsed()?;
        let admits = |status: &Status| self.admits(status);
        let (sandboxes, more) = fleet.page(after.as_ref(), cut.limit, admits);
        let next_cursor = sandboxes.last().filter(|_| more).map(|last| last.id.to_string());
        Ok(SandboxList { sandboxes, next_cursor })
    }
}

/// List sandboxes, sorted by id.
#[utoipa::path(
    get, path = "/v1/sandboxes", params(ListQuery),
    responses((status = 200, description = "A page of sandboxes.", body = SandboxList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(pairs): Query<Vec<(String, String)>>,
) -> Answer<SandboxList> {
    Ok(Json(ListQuery::parse(pairs)?.page(&service.fleet)?))
}

/// Get a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}",
    params(("sandbox" = String, Path, description = "Id or name")),
    responses((status = 200, description = "The sandbox.", body = Status))
)]
async fn get(Named(sandbox): Named) -> Json<Status> {
    Json(sandbox.status())
}

/// Change what a sandbox is, while it lives.
#[utoipa::path(
    patch, path = "/v1/sandboxes/{sandbox}",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = UpdateSandbox,
    responses((status = 200, description = "The sandbox as it is now.", body = Status))
)]
async fn update(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Json(update): Json<UpdateSandbox>,
) -> Answer<Status> {
    calls::update(&service, &sandbox, update).await?;
    Ok(Json(sandbox.status()))
}

/// Delete a sandbox with everything in it.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{sandbox}",
    params(("sandbox" = String, Path, description = "Id or name")),
    responses((status = 204, description = "Nothing of it is left."))
)]
async fn delete(Named(sandbox): Named) -> Response {
    sandbox.delete().await;
    no_content()
}

/// What a sandbox uses of its host.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/usage",
    params(("sandbox" = String, Path, description = "Id or name")),
    responses((status = 200, description = "All 0 if it has no machine.", body = UsageReport))
)]
async fn usage(Named(sandbox): Named) -> Json<UsageReport> {
    let (usage, oom_kills) = sandbox.usage().unwrap_or_default();
    Json(UsageReport {
        memory_bytes: usage.memory_bytes,
        cpu_ms: usage.cpu_micros / 1000,
        disk_bytes: usage.disk_bytes,
        oom_kills,
    })
}

/// What every sandbox uses, and how it sleeps.
#[utoipa::path(
    get, path = "/v1/usage", params(PageQuery),
    responses((status = 200, description = "Sorted by id. Nothing is woken.", body = UsageList))
)]
async fn usages(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<UsageList> {
    let cut = Cut::try_from(query)?;
    let sandboxes = service.fleet.sandboxes();
    // Each is some small files of the host's.
    let read = move || sandboxes.iter().map(usage_of).collect::<Vec<_>>();
    let sandboxes = tokio::task::spawn_blocking(read).await;
    let sandboxes = sandboxes.map_err(StoreError::failed("read what sandboxes use"))?;
    Ok(Json(cut.of(sandboxes, |usage| usage.id.to_string())))
}

fn usage_of(sandbox: &Sandbox) -> SandboxUsage {
    let (usage, _) = sandbox.usage().unwrap_or_default();
    let status = sandbox.status();
    SandboxUsage {
        id: status.id,
        name: status.spec.name,
        state: status.state,
        tier: status.tier,
        memory_bytes: usage.memory_bytes,
        memory_limit_bytes: status.spec.resources.memory_mib.saturating_mul(1024 * 1024),
        cpu_ms: usage.cpu_micros / 1000,
        disk_bytes: usage.disk_bytes,
        saved_bytes: status.saved_bytes,
        last_used_at_ms: status.last_used_at_ms,
        wakes: status.wakes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(id: &str, labels: &[(&str, &str)]) -> Status {
        let spec = serde_json::json!({
            "name": null, "image": "x", "image_id": "0".repeat(64), "resources": {},
            "labels": labels.iter().copied().collect::<std::collections::BTreeMap<_, _>>(),
        });
        Status {
            id: id.parse().unwrap(),
            spec: serde_json::from_value(spec).unwrap(),
            state: SandboxState::Running,
            reason: None,
            message: None,
            generation: 1,
            created_at_ms: 0,
            last_used_at_ms: 0,
            tier: None,
            durable: false,
            saved_bytes: 0,
            wakes: 0,
            recovered_from_ms: None,
            parent: None,
            queued_until_ms: None,
            start_steps: Vec::new(),
        }
    }

    fn parse(pairs: &[(&str, &str)]) -> Result<ListQuery> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        ListQuery::parse(pairs.collect())
    }

    #[test]
    fn all_labels_must_match() {
        let status = status(&"a".repeat(21), &[("team", "blue"), ("env", "a=b")]);
        assert!(parse(&[("label", "team=blue"), ("label", "env=a=b")]).unwrap().admits(&status));
        assert!(!parse(&[("label", "team=blue"), ("label", "x=")]).unwrap().admits(&status));
        assert!(!parse(&[("state", "failed")]).unwrap().admits(&status));
    }

    #[test]
    fn what_can_not_be_read_is_refused() {
        for pair in [("label", "team"), ("state", "tired"), ("limit", "-1"), ("after", "x")] {
            assert!(parse(&[pair]).is_err(), "{pair:?}");
        }
    }
}
