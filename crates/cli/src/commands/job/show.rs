//! Jobs, executions and tasks as people read them.

use std::time::Duration;

use torpor_protocol::job::{Execution, Job, JobSpec, Task, TaskCounts};

use crate::output::{self, plain};
use crate::units;

/// Longest command and outcome in a table.
const WIDTH: usize = 60;

pub(super) fn jobs(jobs: &[Job]) -> String {
    let row = |job: &Job| {
        let spec = &job.spec;
        vec![
            job.name.to_string(),
            from(spec),
            spec.retries.to_string(),
            parallel(spec),
            output::command_line(&spec.command, WIDTH),
        ]
    };
    let header = ["NAME", "FROM", "RETRIES", "PARALLEL", "COMMAND"];
    output::table(&header, jobs.iter().map(row).collect())
}

pub(super) fn job(job: &Job) -> Vec<(&'static str, String)> {
    let mut fields = vec![("name", job.name.to_string())];
    fields.extend(specification(&job.spec));
    fields.push(("created", units::show_time(job.created_at_ms)));
    fields.push(("changed", units::show_time(job.updated_at_ms)));
    fields
}

fn specification(spec: &JobSpec) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("from", from(spec)),
        ("command", output::command_line(&spec.command, usize::MAX)),
        ("retries", spec.retries.to_string()),
        ("timeout", units::show_duration(Duration::from_millis(spec.timeout_ms))),
        ("parallel", parallel(spec)),
        ("results", spec.results.to_string()),
    ];
    if !spec.final_exit_codes.is_empty() {
        let codes: Vec<_> = spec.final_exit_codes.iter().map(ToString::to_string).collect();
        fields.push(("final codes", codes.join(", ")));
    }
    fields
}

/// The snapshot, pool or image.
fn from(spec: &JobSpec) -> String {
    let asked = &spec.sandbox;
    let pool = asked.pool.as_ref().map(|pool| format!("pool {pool}"));
    let from = asked.snapshot.clone().or(pool).or_else(|| asked.image.clone());
    plain(&from.unwrap_or_default())
}

fn parallel(spec: &JobSpec) -> String {
    spec.parallel.map_or_else(|| "-".to_owned(), |most| most.to_string())
}

pub(super) fn executions(executions: &[Execution]) -> String {
    let now_ms = units::now_ms();
    let row = |execution: &Execution| {
        let counts = &execution.counts;
        let job = execution.job.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        vec![
            execution.id.to_string(),
            job,
            execution.state.as_str().to_owned(),
            format!("{}/{}", counts.over(), counts.total()),
            counts.failed.to_string(),
            units::show_age(execution.created_at_ms, now_ms),
        ]
    };
    let header = ["EXECUTION", "JOB", "STATE", "OVER", "FAILED", "AGE"];
    output::table(&header, executions.iter().map(row).collect())
}

pub(super) fn execution(execution: &Execution) -> Vec<(&'static str, String)> {
    let mut fields = vec![("execution", execution.id.to_string())];
    fields.extend(execution.job.as_ref().map(|job| ("job", job.to_string())));
    let state = match execution.reason {
        Some(reason) => format!("{} ({})", execution.state.as_str(), reason.as_str()),
        None => execution.state.as_str().to_owned(),
    };
    fields.push(("state", state));
    fields.push(("tasks", tally(&execution.counts)));
    fields.extend(specification(&execution.spec));
    fields.push(("created", units::show_time(execution.created_at_ms)));
    fields.extend(execution.deadline_ms.map(|at_ms| ("deadline", units::show_time(at_ms))));
    if let Some(ended_at_ms) = execution.ended_at_ms {
        let took = ended_at_ms.saturating_sub(execution.created_at_ms);
        fields.push(("took", units::show_millis(took as f64)));
    }
    fields
}

fn tally(counts: &TaskCounts) -> String {
    let TaskCounts { queued, running, succeeded, failed, cancelled } = *counts;
    let all = [
        ("queued", queued),
        ("running", running),
        ("succeeded", succeeded),
        ("failed", failed),
        ("cancelled", cancelled),
    ];
    let some = all.into_iter().filter(|(_, count)| *count > 0);
    some.map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
}

pub(super) fn tasks(tasks: &[Task]) -> String {
    let row = |task: &Task| {
        let time = task.ran_ms.map_or_else(|| "-".to_owned(), |ms| units::show_millis(ms as f64));
        let files = task.results_bytes.map_or_else(|| "-".to_owned(), units::show_bytes);
        vec![
            task.index.to_string(),
            task.state.as_str().to_owned(),
            task.attempt.to_string(),
            time,
            files,
            outcome(task),
        ]
    };
    let header = ["TASK", "STATE", "ATTEMPTS", "TIME", "FILES", "OUTCOME"];
    output::table(&header, tasks.iter().map(row).collect())
}

/// What it said, or why it failed or waits.
pub(super) fn outcome(task: &Task) -> String {
    let said = task.output.as_ref().map(ToString::to_string);
    let mut text = task.message.clone().or(said).unwrap_or_else(|| "-".to_owned());
    if let (1.., Some(by)) = (task.interruptions, task.interrupted_by) {
        text = format!("{text} (interrupted {} times: {})", task.interruptions, by.as_str());
    }
    output::cut(&plain(&text), WIDTH)
}
