//! What the tests of this module share, and what is refused at once.

use torpor_protocol::ScheduleId;
use torpor_protocol::api::Command;
use torpor_protocol::job::BeginExecution;
use torpor_protocol::schedule::{
    Action, CreateSchedule, Missed, Overlap, Schedule, ScheduledRun, ScheduledSnapshot, When,
};

use super::check;

/// One that runs a command, made at 1,000,000 ms.
pub(super) fn schedule(when: When) -> Schedule {
    let command = Command { command: vec!["true".to_owned()], ..Command::default() };
    Schedule {
        id: "schedule-aaaaaaaaaaaaaaaaaaaaa".parse::<ScheduleId>().unwrap(),
        spec: CreateSchedule {
            name: "tidy".parse().unwrap(),
            when,
            timezone: None,
            action: Action::Run(ScheduledRun { sandbox: "web".to_owned(), command }),
            overlap: Overlap::Skip,
            missed: Missed::One,
            start_within_ms: None,
            jitter_ms: 0,
            paused: false,
        },
        next_at_ms: None,
        created_at_ms: 1_000_000,
        last: None,
    }
}

#[test]
fn an_action_that_makes_no_sense_is_refused_when_it_is_made() {
    let mut spec = schedule(When::EveryMs(1000)).spec;
    check(&spec).unwrap();
    let snapshot = |sandbox: &str, keep| {
        let (sandbox, kind) = (sandbox.to_owned(), Default::default());
        Action::Snapshot(ScheduledSnapshot { sandbox, kind, keep })
    };
    let run = |command| Action::Run(ScheduledRun { sandbox: "web".to_owned(), command });
    let words = vec!["true".to_owned()];
    let job = BeginExecution { tasks: Some(vec!["x".repeat(70_000).into()]), ..Default::default() };
    for (action, word) in [
        (Action::Job(Box::new(job)), "65536"),
        (snapshot("../web", None), "sandbox"),
        (snapshot("web", Some(0)), "keep"),
        (run(Command::default()), "empty"),
        (
            run(Command { command: words, stdin: Some(String::new()), ..Command::default() }),
            "stdin",
        ),
    ] {
        spec.action = action;
        let error = check(&spec).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
