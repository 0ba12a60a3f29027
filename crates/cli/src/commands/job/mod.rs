//! `torpor job`

mod begin;
mod results;
mod show;
pub(super) mod watch;
mod write;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::job::{
    Execution, ExecutionList, ExecutionState, JobList, TaskList, TaskState,
};
use torpor_protocol::{ErrorCode, ExecutionId, JobRef, Name};

use super::removal::remove;
use crate::error::Result;
use crate::output;

/// Run a command for many inputs, each in a sandbox of its own.
///
/// A job says what is run and how; an execution is one run of it, with a task for each input. What runs goes on when
/// the daemon is restarted.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor job create check --snapshot ready --retries 2 -- ./check.py\n  \
    torpor job run check --tasks tasks.json --wait\n  torpor job tasks EXECUTION --state failed\n  \
    torpor job results EXECUTION 3 ./out"
)]
pub(super) struct Job {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(write::Create),
    Update(write::Update),
    /// List jobs.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show details of a job, or of an execution.
    #[command(visible_alias = "inspect")]
    Show {
        /// Name of a job, or id of an execution.
        of: JobRef,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove jobs, or forget executions with their results and logs.
    ///
    /// Executions of a job that is removed stay, and go on.
    Rm {
        /// Names of jobs, or ids of executions that are over.
        #[arg(required = true)]
        of: Vec<JobRef>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
    Run(begin::Run),
    Watch(watch::Watch),
    /// List executions, newest first.
    Executions {
        /// Only those of this job.
        #[arg(value_name = "JOB")]
        job: Option<Name>,
        /// Only those in this state: running, cancelling, succeeded, failed or cancelled.
        #[arg(long)]
        state: Option<ExecutionState>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List the tasks of an execution, and what became of them.
    Tasks {
        execution: ExecutionId,
        /// Only those in this state: queued, running, succeeded, failed or cancelled.
        #[arg(long)]
        state: Option<TaskState>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    Logs(results::Logs),
    Results(results::Results),
    /// End an execution before its time.
    ///
    /// Nothing of it begins any more. Commands that run are told to end, and killed after ten seconds.
    Cancel {
        execution: ExecutionId,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

fn jobs() -> Route {
    Route::new("/v1/jobs")
}

pub(super) fn executions() -> Route {
    Route::new("/v1/executions")
}

pub(super) fn execution(id: &ExecutionId) -> Route {
    executions().part(id.as_str())
}

fn task(id: &ExecutionId, index: u32) -> Route {
    execution(id).then("/tasks").part(&index.to_string())
}

fn one(of: &JobRef) -> Route {
    match of {
        JobRef::Id(id) => execution(id),
        JobRef::Name(name) => jobs().part(name.as_str()),
    }
}

impl Job {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Create(verb) => verb.run(client).await?,
            Action::Update(verb) => verb.run(client).await?,
            Action::Run(verb) => return verb.run(client).await,
            Action::Watch(verb) => return verb.run(client).await,
            Action::Logs(verb) => verb.run(client).await?,
            Action::Results(verb) => verb.run(client).await?,
            Action::Ls { json } => {
                let list: JobList = client.list(&jobs()).await?;
                output::show(json, &list, || show::jobs(&list.jobs))?;
            }
            Action::Show { of, json } => details(client, &of, json).await?,
            Action::Rm { of, force } => {
                remove(client, &of, one, force, ErrorCode::NotFound).await?;
            }
            Action::Executions { job, state, json } => {
                let mut route = executions();
                for (key, value) in [
                    ("job", job.as_ref().map(Name::as_str)),
                    ("state", state.map(ExecutionState::as_str)),
                ] {
                    route = value.into_iter().fold(route, |route, value| route.query(key, value));
                }
                let list: ExecutionList = client.list(&route).await?;
                output::show(json, &list, || show::executions(&list.executions))?;
            }
            Action::Tasks { execution: id, state, json } => {
                let route = execution(&id).then("/tasks");
                let state = state.map(TaskState::as_str).into_iter();
                let route = state.fold(route, |route, state| route.query("state", state));
                let list: TaskList = client.list(&route).await?;
                output::show(json, &list, || show::tasks(&list.tasks))?;
            }
            Action::Cancel { execution: id, json } => {
                let told: Execution = cancel(client, &id).await?;
                output::show_line(json, &told, told.state.as_str())?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

pub(super) async fn cancel(client: &Client, id: &ExecutionId) -> Result<Execution> {
    let nothing = serde_json::json!({});
    Ok(client.post(&execution(id).then("/cancel"), &nothing).await?)
}

async fn details(client: &Client, of: &JobRef, json: bool) -> Result<()> {
    match of {
        JobRef::Id(id) => {
            let found: Execution = client.get(&execution(id)).await?;
            output::show(json, &found, || output::fields(&show::execution(&found)))
        }
        JobRef::Name(_) => {
            let found = client.get(&one(of)).await?;
            output::show(json, &found, || output::fields(&show::job(&found)))
        }
    }
}
