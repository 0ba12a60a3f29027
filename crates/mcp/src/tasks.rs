//! Long runs that a client asks about later: tasks of the protocol, which live in the ledger.
//!
//! - A task is recorded before its id is told. What runs is a process of the sandbox, so a daemon that is
//!   killed, and a sandbox that sleeps, change nothing about it.
//! - Nobody waits for a task here. Who asks looks at the process; what is seen of its end is recorded, and
//!   from then on the same for ever, also without the sandbox.
//! - Only the key that asked for it sees a task.

use std::time::Duration;

use rmcp::model::{
    CallToolResult, ContentBlock, DetailedTask, GetTaskResult, JsonObject, Task, TaskPayload,
    TaskStatus,
};
use serde_json::{Value, json};
use torpor_protocol::api::Process;
use torpor_protocol::{ErrorCode, SandboxRef, time};
use torpor_service::processes::{self, Awake, ProcessRef};
use torpor_service::{Error, McpTask, McpTaskState, Result};

use crate::answer::describe;
use crate::run::{RunOutput, Running};
use crate::tool::Call;

/// Of one key that work at the same time, and as many that ended.
const TASKS_MAX: u32 = 256;
/// How long one is remembered: twice the longest run.
const TTL: Duration = Duration::from_secs(48 * 60 * 60);
/// How often a client should ask.
const POLL: Duration = Duration::from_secs(2);
/// Bytes of each stream in a result: the ledger keeps some hundred of them for a key.
const OUTPUT_MAX: usize = 64 * 1024;
/// Bytes of an id: nobody guesses it, though it would not help.
const ID_BYTES: usize = 16;
/// How long what is kept of a process that ended may take to be read.
const READ_DEADLINE: Duration = Duration::from_secs(20);
/// JSON-RPC: the work was begun and could not be finished.
const INTERNAL: i32 = -32603;

/// Records that a process goes on for this caller. None if he has too many that do.
pub(crate) async fn record(
    call: &Call,
    pid: u32,
    started_at_ms: u64,
    output_max: usize,
) -> Result<Option<String>> {
    let mut id = [0; ID_BYTES];
    getrandom::fill(&mut id).expect("the system has entropy");
    let now_ms = call.service.fleet.clock().now_ms();
    let task = McpTask {
        id: hex::encode(id),
        caller: call.caller.name(),
        sandbox: call.sandbox()?.id().clone(),
        pid,
        started_at_ms,
        output_max: output_max.min(OUTPUT_MAX) as u64,
        state: McpTaskState::Working,
        created_at_ms: now_ms,
        updated_at_ms: now_ms,
        expires_at_ms: now_ms.saturating_add(millis(TTL)),
    };
    let recorded = call.service.ledger.record_mcp_task(&task, TASKS_MAX).await?;
    Ok(recorded.then_some(task.id))
}

/// A task of this caller, and of the sandbox whose server is asked.
pub(crate) async fn find(call: &Call, id: &str) -> Result<McpTask> {
    let now_ms = call.service.fleet.clock().now_ms();
    let found = call.service.ledger.find_mcp_task(id, &call.caller.name(), now_ms).await?;
    let here = |task: &McpTask| call.sandbox.as_ref().is_none_or(|of| *of.id() == task.sandbox);
    found.filter(here).ok_or_else(|| {
        Error::with_hint(
            ErrorCode::NotFound,
            "there is no such task",
            "a task is seen by the API key that asked for it, for two days",
        )
    })
}

/// How far a task is.
pub(crate) async fn get(call: &Call, id: &str) -> Result<GetTaskResult> {
    let mut task = find(call, id).await?;
    let mut message = None;
    if task.state == McpTaskState::Working {
        match look(call, &task).await {
            Ok(None) => {}
            Ok(Some(state)) => task = end(call, task, state).await?,
            Err(error) if is_final(&error) => {
                let reason = describe(&error, &call.request_id);
                task = end(call, task, McpTaskState::Failed(reason)).await?;
            }
            // Nothing is known of it now, and it may well go on.
            Err(error) => message = Some(describe(&error, &call.request_id)),
        }
    }
    let mut shown = as_task(&task);
    shown.status_message = message;
    Ok(GetTaskResult::new(DetailedTask::new(shown, payload(&task.state))))
}

/// Kills the process of a task. One that ended stays as it was, whether somebody saw that before or not.
pub(crate) async fn cancel(call: &Call, id: &str) -> Result<()> {
    let task = find(call, id).await?;
    if task.state != McpTaskState::Working {
        return Ok(());
    }
    let state = match look(call, &task).await {
        Ok(Some(state)) => state,
        Ok(None) => {
            let awake = awake(call, &task).await?;
            processes::kill(&awake, &ProcessRef::Pid(task.pid), None).await?;
            McpTaskState::Cancelled
        }
        Err(error) if is_final(&error) => McpTaskState::Cancelled,
        Err(error) => return Err(error),
    };
    end(call, task, state).await.map(drop)
}

async fn end(call: &Call, task: McpTask, state: McpTaskState) -> Result<McpTask> {
    let now_ms = call.service.fleet.clock().now_ms();
    call.service.ledger.end_mcp_task(&task.id, &state, now_ms).await?;
    // Somebody else may have been first.
    find(call, &task.id).await
}

async fn awake(call: &Call, task: &McpTask) -> Result<Awake> {
    let sandbox = call.service.fleet.find(&SandboxRef::Id(task.sandbox.clone()))?;
    Awake::new(&call.service, sandbox).await
}

/// The process of a task, if the sandbox still knows it.
async fn process_of(awake: &Awake, task: &McpTask) -> Result<Option<Process>> {
    match processes::find(awake, &ProcessRef::Pid(task.pid)).await {
        Ok(process) => Ok(Some(process).filter(|it| it.started_at_ms == task.started_at_ms)),
        Err(error) if error.code() == ErrorCode::ProcessNotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// How it ended, if it did and that could be read. Wakes the sandbox: what sleeps gets no further.
async fn look(call: &Call, task: &McpTask) -> Result<Option<McpTaskState>> {
    let awake = awake(call, task).await?;
    let Some(process) = process_of(&awake, task).await? else {
        let reason = "the sandbox does not know the process any more: its machine was lost or started \
                      anew, it went back to a snapshot, or hundreds of processes ended since";
        return Ok(Some(McpTaskState::Failed(reason.to_owned())));
    };
    if process.running {
        return Ok(None);
    }
    let most = usize::try_from(task.output_max).unwrap_or(usize::MAX);
    let output = processes::attach(awake, &ProcessRef::Pid(task.pid), true, false).await?;
    let mut run = Running::new(output, most);
    if !run.follow(call, READ_DEADLINE).await? {
        return Ok(None);
    }
    let mut report = run.report();
    let ended_at_ms = process.ended_at_ms.unwrap_or(task.started_at_ms);
    report.duration_ms = ended_at_ms.saturating_sub(task.started_at_ms);
    Ok(Some(McpTaskState::Completed(result(&report))))
}

/// Whether the process can't be there any more.
fn is_final(error: &Error) -> bool {
    let gone = [ErrorCode::SandboxNotFound, ErrorCode::SandboxTerminated, ErrorCode::SandboxFailed];
    gone.contains(&error.code()) && !error.lost_agent()
}

fn result(report: &RunOutput) -> String {
    let mut result = CallToolResult::success(vec![ContentBlock::text(report.text(false))]);
    result.structured_content = serde_json::to_value(report).ok();
    serde_json::to_string(&result).unwrap_or_default()
}

/// As the protocol shows it.
pub(crate) fn as_task(task: &McpTask) -> Task {
    let status = match task.state {
        McpTaskState::Working => TaskStatus::Working,
        McpTaskState::Completed(_) => TaskStatus::Completed,
        McpTaskState::Failed(_) => TaskStatus::Failed,
        McpTaskState::Cancelled => TaskStatus::Cancelled,
    };
    let (created, updated) = (time::text(task.created_at_ms), time::text(task.updated_at_ms));
    Task::new(task.id.clone(), status, created, updated)
        .with_ttl_ms(task.expires_at_ms.saturating_sub(task.created_at_ms))
        .with_poll_interval_ms(millis(POLL))
}

fn payload(state: &McpTaskState) -> TaskPayload {
    match state {
        McpTaskState::Working => TaskPayload::Working,
        McpTaskState::Completed(result) => TaskPayload::Completed { result: object(result) },
        McpTaskState::Failed(reason) => {
            let error = json!({"code": INTERNAL, "message": reason});
            TaskPayload::Failed { error: object(&error.to_string()) }
        }
        McpTaskState::Cancelled => TaskPayload::Cancelled,
    }
}

fn object(text: &str) -> JsonObject {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => object,
        Ok(_) | Err(_) => JsonObject::new(),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
