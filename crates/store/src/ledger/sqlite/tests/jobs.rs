//! The queue of tasks: who gets which, how many at once, and who may write about them.

use torpor_protocol::ExecutionId;
use torpor_protocol::job::{
    CancelReason, ExecutionState, Interruption, JobSpec, TaskFailure, TaskState,
};

use super::*;
use crate::{
    Admitted, AttemptEnd, JobLedger as _, NewExecution, QueueBounds, Settled, Settlement,
    TASK_LABEL, TaskClaim, TaskLedger as _, TaskProcess,
};

const ANY: QueueBounds = QueueBounds { executions: 1000, tasks: 100_000, at_once: None };
/// More than any test runs.
const MANY: usize = 100;

fn new(tasks: usize, parallel: usize, created_at_ms: u64) -> NewExecution {
    NewExecution {
        id: ExecutionId::random(),
        job: None,
        spec: JobSpec::default(),
        parallel,
        job_parallel: None,
        asked: None,
        deadline_ms: None,
        created_at_ms,
        inputs: (0..tasks).map(|n| (n > 0).then(|| serde_json::json!({"n": n}))).collect(),
    }
}

impl World {
    async fn begin(&self, tasks: usize, parallel: usize, created_at_ms: u64) -> ExecutionId {
        let new = new(tasks, parallel, created_at_ms);
        assert_eq!(self.ledger.begin_execution(&new, ANY).await.unwrap(), Admitted::Recorded);
        new.id
    }

    async fn claim(&self, now_ms: u64) -> Option<TaskClaim> {
        self.ledger.claim_task(&self.owner, MANY, now_ms).await.unwrap()
    }

    async fn settle(&self, claim: &TaskClaim, settled: Settled) -> Settlement {
        self.ledger.settle_task(&claim.lease, &settled, 50).await.unwrap()
    }
}

fn succeeded() -> Settled {
    Settled::Over(TaskState::Succeeded, AttemptEnd::default())
}

fn failed() -> AttemptEnd {
    AttemptEnd { reason: Some(TaskFailure::Exit), ..AttemptEnd::default() }
}

#[tokio::test]
async fn a_claim_takes_what_is_next_where_fewest_run_and_never_more_than_may() {
    let world = world().await;
    let (large, small) = (world.begin(5, 3, 1).await, world.begin(2, 9, 2).await);
    let mut order = Vec::new();
    while let Some(claim) = world.claim(10).await {
        let name = if claim.lease.execution == large { "large" } else { "small" };
        order.push((name, claim.lease.index));
        let expected = (claim.lease.index > 0).then(|| serde_json::json!({"n": claim.lease.index}));
        assert_eq!((claim.input, claim.lease.attempt), (expected, 1));
    }
    assert_eq!(order, [("large", 0), ("small", 0), ("large", 1), ("small", 1), ("large", 2)]);
    assert!(world.ledger.claim_task(&world.owner, 5, 10).await.unwrap().is_none());
    let length = world.ledger.queue_length().await.unwrap();
    assert_eq!((length.queued, length.running), (2, 5));
    // What this node may run is counted over all of them.
    let other = world.begin(1, 1, 3).await;
    assert!(world.ledger.claim_task(&world.owner, 5, 10).await.unwrap().is_none());
    let claim = world.ledger.claim_task(&world.owner, 6, 10).await.unwrap().unwrap();
    assert_eq!(claim.lease.execution, other);
    let counts = world.ledger.find_execution(&small).await.unwrap().unwrap().counts;
    assert_eq!((counts.running, counts.total()), (2, 2));
}

#[tokio::test]
async fn what_becomes_of_a_task_is_written_once_and_ends_its_execution_with_the_last() {
    let world = world().await;
    let id = world.begin(3, 9, 1).await;
    let (one, two, three) = (
        world.claim(1).await.unwrap(),
        world.claim(1).await.unwrap(),
        world.claim(1).await.unwrap(),
    );
    assert_eq!(world.settle(&one, succeeded()).await, Settlement::Task(TaskState::Succeeded));
    assert_eq!(world.settle(&one, succeeded()).await, Settlement::Lost, "it is over");
    let again = Settled::Again { not_before_ms: 70, end: failed() };
    assert_eq!(world.settle(&two, again).await, Settlement::Task(TaskState::Queued));
    assert_eq!(world.ledger.next_due(60).await.unwrap(), Some(70));
    assert!(world.claim(69).await.is_none());
    let two = world.claim(70).await.unwrap();
    assert_eq!((two.lease.attempt, two.failures), (2, 1));
    let later = Settled::Later { not_before_ms: 70, end: AttemptEnd::default() };
    world.settle(&two, later).await;
    let two = world.claim(70).await.unwrap();
    assert_eq!((two.lease.attempt, two.failures), (2, 1), "no room is no attempt");
    let lost = Settled::Interrupted { by: Interruption::SandboxLost, not_before_ms: 0 };
    world.settle(&two, lost).await;
    let two = world.claim(70).await.unwrap();
    assert_eq!((two.lease.attempt, two.failures, two.interruptions), (3, 1, 1));
    world.settle(&two, Settled::Over(TaskState::Failed, failed())).await;
    let execution = world.ledger.find_execution(&id).await.unwrap().unwrap();
    assert_eq!((execution.state, execution.ended_at_ms), (ExecutionState::Running, None));
    assert_eq!(world.ledger.erase_execution(&id).await.unwrap(), None, "it is not over");
    world.settle(&three, succeeded()).await;
    let execution = world.ledger.find_execution(&id).await.unwrap().unwrap();
    assert_eq!((execution.state, execution.ended_at_ms), (ExecutionState::Failed, Some(50)));
    assert_eq!((execution.counts.succeeded, execution.counts.failed), (2, 1));
    let over = world.ledger.tasks_over(&id, 1, 9).await.unwrap();
    let over: Vec<_> = over.iter().map(|(place, task)| (*place, task.index)).collect();
    assert_eq!(over, [(2, 1), (3, 2)], "as they became so");
    assert!(world.ledger.erase_execution(&id).await.unwrap().is_some());
    assert!(world.ledger.find_task(&id, 0).await.unwrap().is_none());
}

#[tokio::test]
async fn the_next_daemon_goes_on_and_the_one_before_writes_nothing_any_more() {
    let mut world = world().await;
    let id = world.begin(2, 9, 1).await;
    let claim = world.claim(1).await.unwrap();
    let process =
        TaskProcess { sandbox: SandboxId::random(), pid: 7, started_at_ms: 3, timeout_at_ms: 900 };
    assert!(world.ledger.note_process(&claim.lease, &process).await.unwrap());
    let before = world.owner.clone();
    world.owner = world.ledger.take_over().await.unwrap();
    assert!(world.ledger.claim_task(&before, MANY, 1).await.unwrap().is_none());
    assert!(world.ledger.take_over_tasks(&before).await.unwrap().is_empty());
    let taken = world.ledger.take_over_tasks(&world.owner).await.unwrap();
    let [taken] = taken.as_slice() else { panic!("{taken:?}") };
    assert_eq!((taken.lease.attempt, taken.process.as_ref()), (1, Some(&process)));
    assert!(taken.taken_over);
    assert_eq!(world.settle(&claim, succeeded()).await, Settlement::Lost);
    assert!(!world.ledger.note_process(&claim.lease, &process).await.unwrap());
    assert_eq!(world.settle(taken, succeeded()).await, Settlement::Task(TaskState::Succeeded));
    assert_eq!(world.ledger.task_sandboxes(None, 9).await.unwrap(), [process.sandbox]);
    assert_eq!(
        world.ledger.known_executions(&[ExecutionId::random(), id.clone()]).await.unwrap(),
        [id]
    );
}

#[tokio::test]
async fn what_is_cancelled_begins_no_more_and_ends_with_what_runs() {
    let world = world().await;
    let id = world.begin(3, 1, 1).await;
    let claim = world.claim(1).await.unwrap();
    world.ledger.cancel_execution(&id, CancelReason::Requested, 9).await.unwrap();
    assert!(world.claim(10).await.is_none());
    let stop = world.ledger.tasks_to_stop(&world.owner).await.unwrap();
    assert_eq!(stop, [(id.clone(), 0)]);
    let execution = world.ledger.find_execution(&id).await.unwrap().unwrap();
    assert_eq!((execution.state, execution.counts.cancelled), (ExecutionState::Cancelling, 2));
    // It would be tried again.
    let again = Settled::Again { not_before_ms: 0, end: failed() };
    assert_eq!(world.settle(&claim, again).await, Settlement::Task(TaskState::Cancelled));
    let execution = world.ledger.find_execution(&id).await.unwrap().unwrap();
    assert_eq!((execution.state, execution.counts.cancelled), (ExecutionState::Cancelled, 3));
    assert_eq!(world.ledger.tasks_over(&id, 0, 9).await.unwrap().len(), 3);
}

#[tokio::test]
async fn an_execution_is_recorded_once_and_within_bounds() {
    let world = world().await;
    let one = NewExecution { asked: Some("a hash".to_owned()), ..new(3, 2, 1) };
    let begin =
        async |new: &NewExecution, bounds| world.ledger.begin_execution(new, bounds).await.unwrap();
    assert_eq!(begin(&one, QueueBounds { tasks: 2, ..ANY }).await, Admitted::Full);
    // Two of the three would run at once.
    assert_eq!(begin(&one, QueueBounds { at_once: Some(1), ..ANY }).await, Admitted::Full);
    assert_eq!(begin(&one, QueueBounds { at_once: Some(2), ..ANY }).await, Admitted::Recorded);
    assert_eq!(begin(&one, ANY).await, Admitted::Known);
    assert_eq!(world.ledger.execution_asked(&one.id).await.unwrap(), one.asked);
    assert_eq!(begin(&new(1, 1, 2), QueueBounds { executions: 1, ..ANY }).await, Admitted::Full);
    assert_eq!(begin(&new(1, 1, 2), QueueBounds { at_once: Some(2), ..ANY }).await, Admitted::Full);
    let three = QueueBounds { at_once: Some(3), ..ANY };
    assert_eq!(begin(&new(1, 1, 2), three).await, Admitted::Recorded, "two of one run at once");
    assert_eq!(world.ledger.tasks(&one.id, None, Some(0), 9).await.unwrap().tasks.len(), 2);
}

#[tokio::test]
async fn a_page_of_tasks_ends_where_they_have_said_much() {
    let world = world().await;
    let id = world.begin(4, 9, 1).await;
    // A page has room for two.
    let said = format!("\"{}\"", "x".repeat(4 * 1024 * 1024));
    while let Some(claim) = world.claim(1).await {
        let end = AttemptEnd { output: Some(said.parse().unwrap()), ..AttemptEnd::default() };
        world.settle(&claim, Settled::Over(TaskState::Succeeded, end)).await;
    }
    let page = async |after, limit| {
        let page = world.ledger.tasks(&id, None, after, limit).await.unwrap();
        (page.tasks.iter().map(|task| task.index).collect::<Vec<_>>(), page.more)
    };
    assert_eq!(page(None, 1000).await, (vec![0, 1], true));
    assert_eq!(page(Some(1), 1000).await, (vec![2, 3], false));
    assert_eq!(page(Some(1), 1).await, (vec![2], true));
}

#[tokio::test]
async fn an_execution_without_room_lets_others_go_first_until_one_of_its_tasks_is_over() {
    let world = world().await;
    let (full, other) = (world.begin(3, 9, 1).await, world.begin(9, 9, 2).await);
    let (runs, _) = (world.claim(1).await.unwrap(), world.claim(1).await.unwrap());
    let refused = world.claim(1).await.unwrap();
    assert_eq!((&runs.lease.execution, &refused.lease.execution), (&full, &full));
    let later = Settled::Later { not_before_ms: 100, end: AttemptEnd::default() };
    world.settle(&refused, later).await;
    for _ in 0..3 {
        assert_eq!(world.claim(50).await.unwrap().lease.execution, other);
    }
    assert_eq!(world.ledger.next_due(50).await.unwrap(), Some(100));
    world.settle(&runs, succeeded()).await;
    assert_eq!(world.claim(50).await.unwrap().lease.execution, full);
}

#[tokio::test]
async fn the_executions_of_one_job_share_its_limit() {
    let world = world().await;
    let job = Some("check".parse().unwrap());
    for created_at_ms in [1, 2] {
        let new = new(5, 5, created_at_ms);
        let new = NewExecution { job: job.clone(), job_parallel: Some(3), ..new };
        world.ledger.begin_execution(&new, ANY).await.unwrap();
    }
    let mut claimed = Vec::new();
    while let Some(claim) = world.claim(10).await {
        claimed.push(claim);
    }
    assert_eq!(claimed.len(), 3);
    let other = world.begin(1, 1, 3).await;
    assert_eq!(world.claim(10).await.unwrap().lease.execution, other);
    world.settle(&claimed[0], succeeded()).await;
    assert!(world.claim(10).await.is_some() && world.claim(10).await.is_none());
}

#[tokio::test]
async fn results_are_summed_and_those_of_the_execution_that_ended_first_are_forgotten() {
    let world = world().await;
    for (bytes, ends_at_ms) in [(5, 20), (7, 30), (0, 10)] {
        world.begin(1, 1, 1).await;
        let claim = world.claim(1).await.unwrap();
        let results_bytes = (bytes > 0).then_some(bytes);
        let end = AttemptEnd { results_bytes, ..AttemptEnd::default() };
        let over = Settled::Over(TaskState::Succeeded, end);
        world.ledger.settle_task(&claim.lease, &over, ends_at_ms).await.unwrap();
    }
    assert_eq!(world.ledger.results_bytes().await.unwrap(), 12);
    let first = world.ledger.oldest_results().await.unwrap().unwrap();
    world.ledger.forget_results(&first).await.unwrap();
    assert_eq!(world.ledger.results_bytes().await.unwrap(), 7);
    let task = world.ledger.find_task(&first, 0).await.unwrap().unwrap();
    assert_eq!((task.ended_at_ms, task.results_bytes), (Some(20), None));
    assert!(task.message.unwrap().contains("made room"));
    assert_ne!(world.ledger.oldest_results().await.unwrap(), Some(first));
}

#[tokio::test]
async fn an_execution_is_forgotten_with_what_is_remembered_of_its_sandboxes() {
    let (world, image) = pictured().await;
    let ids = [ExecutionId::random(), ExecutionId::random()];
    for id in &ids {
        let new = NewExecution { id: id.clone(), ..new(1, 1, 1) };
        world.ledger.begin_execution(&new, ANY).await.unwrap();
        world.ledger.cancel_execution(id, CancelReason::Requested, 9).await.unwrap();
    }
    let ended = async |label: String| {
        let Record { id, mut spec, .. } = record(&image, None);
        spec.labels.insert(TASK_LABEL.to_owned(), label);
        let (created_at_ms, ended_at_ms, reason) = (1, 9, None);
        let ended = ArchivedSandbox { id, spec, created_at_ms, ended_at_ms, reason };
        world.archive(&ended).await.unwrap();
        ended.id
    };
    let mut its = [ended(format!("{}/0/1", ids[0])).await, ended(format!("{}/0/2", ids[0])).await];
    let other = ended(format!("{}/0/1", ids[1])).await;
    let mut gone = world.ledger.erase_execution(&ids[0]).await.unwrap().unwrap();
    its.sort();
    gone.sort();
    assert_eq!(gone, its);
    assert_eq!(world.ledger.archived_ids().await.unwrap(), [other].into());
}
