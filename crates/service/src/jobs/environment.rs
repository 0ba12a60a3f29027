//! What a task is given: its sandbox, its command, its variables.

use std::collections::BTreeMap;

use torpor_protocol::api::{Command, CreateSandbox};
use torpor_protocol::guest::{RestartPolicy, Supervision};
use torpor_protocol::{ExecutionId, SandboxId};
use torpor_store::{TASK_LABEL, TaskClaim, TaskLease};

use super::admission::NUMBER;
use crate::error::{Error, Result};

/// The end of a label of one that stays when its attempt is over.
const KEPT: &str = "kept";
/// A longer input is in its file only: a variable is copied whenever a process starts another.
const INPUT_MAX: usize = 16 * 1024;

/// An attempt, as a label of its sandbox says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mark {
    pub execution: ExecutionId,
    pub index: u32,
    pub attempt: u32,
    pub keep: bool,
}

impl Mark {
    pub(super) fn of(claim: &TaskClaim) -> Self {
        let TaskLease { execution, index, attempt, owner: _ } = &claim.lease;
        let (index, attempt) = (*index, *attempt);
        Self { execution: execution.clone(), index, attempt, keep: claim.spec.keep }
    }

    /// What the labels of a sandbox say, if it is one of a task.
    pub(super) fn read(labels: &BTreeMap<String, String>) -> Option<Self> {
        let mut parts = labels.get(TASK_LABEL)?.split('/');
        Some(Self {
            execution: parts.next()?.parse().ok()?,
            index: parts.next()?.parse().ok()?,
            attempt: parts.next()?.parse().ok()?,
            keep: parts.next() == Some(KEPT),
        })
    }

    /// By what its sandbox is made, and its process called: nobody else makes one of that name.
    pub(super) fn key(&self) -> String {
        format!("task-{}-{}-{}", self.execution, self.index, self.attempt)
    }

    fn label(&self) -> String {
        let end = if self.keep { format!("/{KEPT}") } else { String::new() };
        format!("{}/{}/{}{end}", self.execution, self.index, self.attempt)
    }
}

/// The number of a task for people, from 1.
fn number(claim: &TaskClaim) -> String {
    (u64::from(claim.lease.index) + 1).to_string()
}

/// The sandbox of a task.
pub(super) fn sandbox(claim: &TaskClaim) -> Result<CreateSandbox> {
    let mut asked = claim.spec.sandbox.clone();
    if let Some(pattern) = &claim.spec.sandbox_name {
        let name = pattern.replace(NUMBER, &number(claim)).parse();
        asked.name = Some(name.map_err(|error| Error::invalid(format!("sandbox_name: {error}")))?);
    }
    asked.labels.insert(TASK_LABEL.to_owned(), Mark::of(claim).label());
    Ok(asked)
}

/// The command of a task, as a process that lives on when the daemon does not.
pub(super) fn command(claim: &TaskClaim, input: Option<&str>) -> Command {
    let spec = &claim.spec;
    let number = number(claim);
    let fill = |text: &String| match spec.numbered {
        true => text.replace(NUMBER, &number),
        false => text.clone(),
    };
    let mut env: BTreeMap<_, _> =
        spec.env.iter().map(|(name, value)| (name.clone(), fill(value))).collect();
    env.extend(variables(claim, input));
    let name = Some(Mark::of(claim).key());
    Command {
        command: spec.command.iter().map(fill).collect(),
        env,
        cwd: spec.cwd.clone(),
        user: spec.user.clone(),
        keep_awake: true,
        supervise: Some(Supervision { name, restart: RestartPolicy::Never, ..Default::default() }),
        ..Command::default()
    }
}

fn variables(claim: &TaskClaim, input: Option<&str>) -> BTreeMap<String, String> {
    let TaskLease { execution, index, attempt, owner: _ } = &claim.lease;
    let mut all = vec![
        ("TORPOR_EXECUTION", execution.to_string()),
        ("TORPOR_TASK_INDEX", index.to_string()),
        ("TORPOR_TASK_COUNT", claim.total.to_string()),
        ("TORPOR_TASK_ATTEMPT", attempt.to_string()),
        ("TORPOR_TASK_RESULTS", claim.spec.results.to_string()),
    ];
    all.extend(claim.job.as_ref().map(|job| ("TORPOR_JOB", job.to_string())));
    if let Some(input) = input {
        all.push(("TORPOR_TASK_INPUT_FILE", claim.spec.input_file.to_string()));
        if input.len() <= INPUT_MAX {
            all.push(("TORPOR_TASK_INPUT", input.to_owned()));
        }
    }
    all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Whose sandbox it is, for the log.
pub(super) fn title(claim: &TaskClaim, sandbox: Option<&SandboxId>) -> String {
    let TaskLease { execution, index, attempt, owner: _ } = &claim.lease;
    let inside = sandbox.map_or_else(String::new, |id| format!(" in {id}"));
    format!("{execution}/{index}, attempt {attempt}{inside}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_says_which_attempt_a_sandbox_is_of() {
        for keep in [false, true] {
            let mark = Mark { execution: ExecutionId::random(), index: 7, attempt: 2, keep };
            let labels = [(TASK_LABEL.to_owned(), mark.label())].into();
            assert_eq!(Mark::read(&labels), Some(mark));
        }
        for bad in ["", "x/1/1", "exec-1", "/0/0"] {
            assert_eq!(
                Mark::read(&[(TASK_LABEL.to_owned(), bad.to_owned())].into()),
                None,
                "{bad}"
            );
        }
        assert_eq!(Mark::read(&BTreeMap::new()), None);
    }
}
