//! Forks: many sandboxes that begin at one moment, all at once. One that fails takes no other.

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::State;
use futures_util::future::join_all;
use torpor_lifecycle::Sandbox;
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::snapshot::{FORKS_MAX, Fork, ForkList, ForkOutcome};
use torpor_protocol::{Name, SandboxRef, SandboxSpec, State as SandboxState};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::error::{ApiError, Result};
use super::extract::{Json, Named, RequestId, SnapshotPath};
use super::moment::Held;
use super::sandboxes::Unanswered;
use crate::app::App;
use crate::room;

/// Stands for the number of a fork in its name.
const NUMBER: &str = "{n}";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(fork_snapshot)).routes(routes!(fork_sandbox))
}

/// Fork a snapshot.
#[utoipa::path(
    post, path = "/v1/snapshots/{snapshot}/fork", operation_id = "fork",
    params(("snapshot" = String, Path, description = "Id or name")),
    request_body = Fork,
    responses((
        status = 200, body = ForkList,
        description = "What became of each fork, in order: a sandbox that runs, or an error.",
    ))
)]
async fn fork_snapshot(
    State(app): State<Arc<App>>,
    SnapshotPath(snapshot): SnapshotPath,
    id: RequestId,
    request: Option<Json<Fork>>,
) -> Answer<ForkList> {
    let fork = request.map(|Json(request)| request).unwrap_or_default();
    let names = names(&fork)?;
    let moment = Held::of(&app, &snapshot).await?;
    Ok(Json(begin(&app, moment, &fork, names, &id).await?))
}

/// Fork a sandbox as it is now. It goes on; if it sleeps, it is not woken.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/fork", operation_id = "fork",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = Fork,
    responses((
        status = 200, body = ForkList,
        description = "What became of each fork, in order: a sandbox that runs, or an error.",
    ))
)]
async fn fork_sandbox(
    State(app): State<Arc<App>>,
    Named(sandbox): Named,
    id: RequestId,
    request: Option<Json<Fork>>,
) -> Answer<ForkList> {
    let fork = request.map(|Json(request)| request).unwrap_or_default();
    let names = names(&fork)?;
    let ran = sandbox.status().state == SandboxState::Running;
    let moment = Held::now(&app, &SandboxRef::Id(sandbox.id().clone())).await?;
    if ran {
        app.metrics.paused(moment.about().pause_ms);
    }
    Ok(Json(begin(&app, moment, &fork, names, &id).await?))
}

/// The names of all forks, known to be good before the first begins.
fn names(fork: &Fork) -> Result<Vec<Option<Name>>> {
    if !(1..=FORKS_MAX).contains(&fork.count) {
        return Err(ApiError::invalid(format!("count must be from 1 to {FORKS_MAX}")));
    }
    let Some(pattern) = &fork.name else { return Ok(vec![None; fork.count]) };
    if fork.count > 1 && !pattern.contains(NUMBER) {
        let message = format!("name: several forks need {NUMBER} in it, for their number");
        return Err(ApiError::invalid(message));
    }
    let named = |n: usize| {
        let name: Name = pattern
            .replace(NUMBER, &n.to_string())
            .parse()
            .map_err(|error| ApiError::invalid(format!("{error}")))?;
        Ok(name)
    };
    let names = (1..=fork.count).map(named).collect::<Result<Vec<_>>>()?;
    let distinct: HashSet<_> = names.iter().collect();
    if distinct.len() < names.len() {
        return Err(ApiError::invalid("name: two forks would have the same"));
    }
    Ok(names.into_iter().map(Some).collect())
}

/// What a fork asks for, as if it were asked for alone.
fn wish(fork: &Fork, from: &SandboxSpec) -> CreateSandbox {
    CreateSandbox {
        env: fork.env.clone(),
        labels: fork.labels.clone(),
        network: fork.network.unwrap_or(from.network),
        lifetime: fork.lifetime,
        standby: fork.standby.clone(),
        cpus: fork.cpus,
        memory_mib: fork.memory_mib,
        disk_mib: fork.disk_mib,
        ..CreateSandbox::default()
    }
}

async fn begin(
    app: &Arc<App>,
    moment: Held,
    fork: &Fork,
    names: Vec<Option<Name>>,
    RequestId(id): &RequestId,
) -> Result<ForkList> {
    let spec = moment.admit(app, wish(fork, &moment.about().spec))?;
    let needed_mib = moment.memory_mib().saturating_mul(names.len() as u64);
    room::make(app, names.len(), needed_mib).await?;
    let begun = names.into_iter().map(|name| {
        let spec = SandboxSpec { name, ..spec.clone() };
        begin_one(app, &moment, spec)
    });
    let forks = join_all(begun).await.into_iter().map(|begun| match begun {
        Ok((sandbox, unanswered)) => {
            app.metrics.forked();
            unanswered.answered();
            ForkOutcome { sandbox: Some(Box::new(sandbox.status())), error: None }
        }
        Err(error) => {
            if let Some(error) = error.blame() {
                tracing::error!(error, "a fork failed");
            }
            ForkOutcome { sandbox: None, error: Some(error.told(id)) }
        }
    });
    Ok(ForkList { forks: forks.collect() })
}

/// Returns when it runs. On `Err`, and if it is given up, nothing is left of an unnamed one.
async fn begin_one(app: &App, moment: &Held, spec: SandboxSpec) -> Result<(Sandbox, Unanswered)> {
    let sandbox = app.fleet.begin(moment, spec).await?;
    let unanswered = Unanswered::new(&sandbox);
    if let Err(error) = sandbox.awake().await {
        sandbox.delete().await;
        return Err(error.into());
    }
    Ok((sandbox, unanswered))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn try_names(count: usize, name: Option<&str>) -> Result<Vec<String>> {
        let fork = Fork { count, name: name.map(str::to_owned), ..Fork::default() };
        let names = names(&fork)?;
        Ok(names.into_iter().map(|name| name.map_or_else(String::new, |n| n.to_string())).collect())
    }

    #[test]
    fn forks_are_numbered_from_one() {
        assert_eq!(try_names(3, Some("agent-{n}")).unwrap(), ["agent-1", "agent-2", "agent-3"]);
        assert_eq!(try_names(1, Some("agent")).unwrap(), ["agent"]);
        assert_eq!(try_names(2, None).unwrap(), ["", ""]);
    }

    #[test]
    fn a_wrong_number_or_name_is_refused_before_anything_begins() {
        for (count, name) in [
            (0, None),
            (FORKS_MAX + 1, None),
            (10_000, None),
            (2, Some("agent")),
            (2, Some("{n}")),
            (2, Some("Agent-{n}")),
            (1, Some("../../etc")),
            (1000, Some(&*format!("{}{{n}}", "a".repeat(60)))),
        ] {
            assert!(try_names(count, name).is_err(), "{count} {name:?}");
        }
    }
}
