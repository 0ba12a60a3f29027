//! Which jobs may be: what is wrong with one is said when it is written, and not by each of its tasks.

use torpor_protocol::Name;
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::guest::FailureCode;
use torpor_protocol::job::{JobSpec, TASKS_MAX};

use crate::error::{Error, Result};
use crate::{Service, calls};

/// Stands for the number of a task.
pub(super) const NUMBER: &str = "{n}";
/// More attempts are a loop.
const RETRIES_MAX: u32 = 100;
/// Longest attempt, execution and pause: what takes longer is a service.
const WEEK_MS: u64 = 7 * 24 * 60 * 60 * 1000;
const PAUSE_MAX_MS: u64 = 24 * 60 * 60 * 1000;
/// All exit codes there are.
const CODES_MAX: usize = 256;
/// Bytes of the command and its variables: with an input they fit into one request to the agent.
const WORDS_MAX: usize = 64 * 1024;

/// Refuses what no task could be.
pub(super) async fn check(app: &Service, spec: &JobSpec) -> Result<()> {
    check_command(spec)?;
    check_numbers(spec)?;
    check_sandbox(&spec.sandbox)?;
    check_names(spec, 1)?;
    calls::check::create(app, spec.sandbox.clone()).await
}

fn check_command(spec: &JobSpec) -> Result<()> {
    if spec.command.first().is_none_or(String::is_empty) {
        return Err(Error::invalid("command: it begins with its program"));
    }
    let pairs = spec.env.iter().flat_map(|(name, value)| [name, value]);
    let words: Vec<&String> = spec.command.iter().chain(pairs).collect();
    if words.iter().any(|word| word.contains('\0')) {
        return Err(Error::invalid("command, env: no word contains NUL"));
    }
    if let Some(name) = spec.env.keys().find(|name| name.is_empty() || name.contains('=')) {
        return Err(Error::invalid(format!("env: {name:?} is no name of a variable")));
    }
    let bytes: usize = words.iter().map(|word| word.len() + 1).sum();
    if bytes > WORDS_MAX {
        let message = format!("command and env have {bytes} bytes, {WORDS_MAX} are allowed");
        return Err(Error::invalid(message));
    }
    Ok(())
}

fn check_numbers(spec: &JobSpec) -> Result<()> {
    let within = |what: &str, number: u64, least: u64, most: u64| {
        if (least..=most).contains(&number) {
            return Ok(());
        }
        Err(Error::invalid(format!("{what} must be from {least} to {most}, not {number}")))
    };
    within("retries", spec.retries.into(), 0, RETRIES_MAX.into())?;
    within("timeout_ms", spec.timeout_ms, 1, WEEK_MS)?;
    within("backoff.max_ms", spec.backoff.max_ms, 0, PAUSE_MAX_MS)?;
    within("backoff.initial_ms", spec.backoff.initial_ms, 0, PAUSE_MAX_MS)?;
    within(
        "the number of final_exit_codes",
        spec.final_exit_codes.len() as u64,
        0,
        CODES_MAX as u64,
    )?;
    spec.parallel.map_or(Ok(()), |most| within("parallel", most.into(), 1, TASKS_MAX as u64))
}

fn check_sandbox(asked: &CreateSandbox) -> Result<()> {
    let sources = [asked.image.is_some(), asked.pool.is_some(), asked.snapshot.is_some()];
    if sources.into_iter().filter(|named| *named).count() != 1 {
        return Err(Error::invalid(
            "sandbox: name what the sandboxes of tasks begin from: exactly one of image, pool and snapshot",
        ));
    }
    if asked.name.is_some() {
        return Err(Error::invalid(
            "sandbox.name: tasks are many; write sandbox_name with {n} in it",
        ));
    }
    if asked.queue_ms.is_some() {
        return Err(Error::invalid("sandbox.queue_ms: tasks wait for room by themselves"));
    }
    if asked.standby.auto_wake == Some(false) {
        return Err(Error::invalid("sandbox.standby.auto_wake: a task wakes its sandbox"));
    }
    Ok(())
}

/// Whether so many sandboxes can have the name that is asked for.
pub(super) fn check_names(spec: &JobSpec, tasks: usize) -> Result<()> {
    let Some(pattern) = &spec.sandbox_name else { return Ok(()) };
    if tasks > 1 && !pattern.contains(NUMBER) {
        let message = format!("sandbox_name: several tasks need {NUMBER} in it, for their number");
        return Err(Error::invalid(message));
    }
    // The last is the longest.
    let last: std::result::Result<Name, _> = pattern.replace(NUMBER, &tasks.to_string()).parse();
    last.map(drop).map_err(|error| Error::invalid(format!("sandbox_name: {error}")))
}

/// How long an execution may take.
pub(super) fn deadline(timeout_ms: u64) -> Result<u64> {
    if (1..=WEEK_MS).contains(&timeout_ms) {
        return Ok(timeout_ms);
    }
    Err(Error::invalid(format!("timeout_ms must be from 1 to {WEEK_MS}")))
}

/// Whether an agent that says no to a command or its input means what is asked, and not the moment.
pub(super) fn is_about_task(code: FailureCode) -> bool {
    match code {
        FailureCode::CannotStart
        | FailureCode::NoSuchUser
        | FailureCode::Invalid
        | FailureCode::NoSuchFile
        | FailureCode::NotADirectory
        | FailureCode::IsADirectory
        | FailureCode::Denied
        | FailureCode::Io
        | FailureCode::DiskFull => true,
        FailureCode::NoSuchProcess
        | FailureCode::NotEmpty
        | FailureCode::Exists
        | FailureCode::Busy
        | FailureCode::Limit
        | FailureCode::NotListening => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(change: impl FnOnce(&mut JobSpec)) -> JobSpec {
        let mut spec = JobSpec { command: vec!["true".to_owned()], ..JobSpec::default() };
        spec.sandbox.image = Some("base".to_owned());
        change(&mut spec);
        spec
    }

    fn refused(change: impl FnOnce(&mut JobSpec)) -> String {
        let spec = spec(change);
        let checked = check_command(&spec)
            .and_then(|()| check_numbers(&spec))
            .and_then(|()| check_sandbox(&spec.sandbox))
            .and_then(|()| check_names(&spec, 10));
        checked.map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn what_is_wrong_with_a_job_is_said_by_name() {
        assert_eq!(refused(|_| ()), "");
        assert!(refused(|spec| spec.command.clear()).starts_with("command:"));
        assert!(refused(|spec| spec.retries = 101).starts_with("retries must be"));
        assert!(refused(|spec| spec.timeout_ms = 0).starts_with("timeout_ms"));
        assert!(refused(|spec| spec.parallel = Some(0)).starts_with("parallel"));
        assert!(refused(|spec| spec.sandbox.image = None).contains("exactly one of"));
        let pool = "warm".parse().unwrap();
        assert!(refused(|spec| spec.sandbox.pool = Some(pool)).contains("exactly one of"));
        assert!(refused(|spec| spec.sandbox.queue_ms = Some(1)).contains("queue_ms"));
        assert!(refused(|spec| spec.sandbox_name = Some("agent".into())).contains("{n}"));
        assert!(refused(|spec| spec.sandbox_name = Some("Agent-{n}".into())).contains("a-z"));
        assert!(
            refused(|spec| spec.env = [("A=B".to_owned(), String::new())].into()).contains("A=B")
        );
        assert!(refused(|spec| spec.command.push("x".repeat(WORDS_MAX))).contains("bytes"));
    }
}
