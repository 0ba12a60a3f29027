//! Run a command and tell what it says until it ended. It is killed when the client goes away.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use tokio::time::Instant;
use torpor_protocol::guest::{ProcessSpec, Request};
use torpor_service::Error;
use torpor_service::Service;
use torpor_service::processes::Awake;
use torpor_service::processes::Output;

use super::command::{Command, without_default_user};
use super::{Result, output};
use crate::tensorlake::extract::Body;
use crate::tensorlake::gate::Inside;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new().route("/processes/run", post(run))
}

async fn run(
    State(service): State<Arc<Service>>,
    Inside(awake): Inside,
    Body(command): Body<Command>,
) -> Result<Response> {
    let begun = Instant::now();
    let output = open(&service, awake, command.attached()?).await?;
    Ok(output::run_events(service, output, begun))
}

async fn open(service: &Service, awake: Awake, spec: ProcessSpec) -> Result<Output> {
    let sandbox = awake.sandbox.clone();
    let error = match Output::open(awake, &Request::Run(spec.clone()), None).await {
        Ok(output) => return Ok(output),
        Err(error) => error,
    };
    if let Error::Guest(refused) = &error
        && let Some(spec) = without_default_user(&spec, refused)
    {
        let awake = Awake::new(service, sandbox).await?;
        return Ok(Output::open(awake, &Request::Run(spec), None).await?);
    }
    Err(error.into())
}
