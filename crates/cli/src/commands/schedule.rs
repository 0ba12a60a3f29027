//! `torpor schedule`

use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use torpor_client::{Client, Route};
use torpor_protocol::api::Command;
use torpor_protocol::job::BeginExecution;
use torpor_protocol::schedule::{
    Action as Does, CreateSchedule, Firing, FiringList, Missed, Overlap, Schedule as Kept,
    ScheduleList, ScheduledRun, ScheduledSnapshot, When,
};
use torpor_protocol::time::Instant;
use torpor_protocol::{ErrorCode, Name, SandboxRef, ScheduleRef, SnapshotKind};

use super::parse_env;
use super::removal::remove;
use crate::error::Result;
use crate::output::{self, plain};
use crate::units::{self, millis, parse_duration, parse_time};

/// Manage schedules: commands, jobs and snapshots at times.
///
/// A command wakes its sandbox and keeps it awake while it runs. Times that pass while no daemon runs are made up for as
/// --missed says.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor schedule create backup --cron '0 3 * * *' --timezone Europe/Berlin --sandbox web -- ./backup\n  \
    torpor schedule create keep --every 1h --snapshot web --keep 24\n  \
    torpor schedule create nightly --cron '0 2 * * *' --job resize --count 8\n  \
    torpor schedule create once --after 10m --sandbox web -- ./report\n  \
    torpor schedule ls\n  torpor schedule history backup"
)]
pub(super) struct Schedule {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(Box<Create>),
    /// List them with their next times.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show all about one.
    #[command(visible_alias = "inspect")]
    Show {
        /// Name or id.
        schedule: ScheduleRef,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove them, and end what they do. Snapshots that they took stay.
    Rm {
        /// Names or ids.
        #[arg(required = true)]
        schedules: Vec<ScheduleRef>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
    /// Let one rest. What it does goes on.
    Pause {
        schedule: ScheduleRef,
    },
    /// Let one fire again, from now on.
    Resume {
        schedule: ScheduleRef,
    },
    /// Fire one now, besides its times.
    Run {
        schedule: ScheduleRef,
    },
    /// Show when one fired, and what became of it, newest first.
    History {
        /// Name or id.
        schedule: ScheduleRef,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Have something done at times, and print its name.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("when").required(true))]
#[command(group = ArgGroup::new("what").required(true))]
struct Create {
    name: Name,
    /// A cron expression, such as '0 3 * * *'.
    #[arg(long, group = "when", value_name = "EXPRESSION")]
    cron: Option<String>,
    /// Again and again, such as 10m.
    #[arg(long, group = "when", value_name = "DURATION", value_parser = parse_duration)]
    every: Option<Duration>,
    /// Once, such as 2027-01-31T12:00:00Z.
    #[arg(long, group = "when", value_name = "TIME", value_parser = parse_time)]
    at: Option<u64>,
    /// Once, such as 10m from now.
    #[arg(long, group = "when", value_name = "DURATION", value_parser = parse_duration)]
    after: Option<Duration>,
    /// Time zone of --cron, such as Europe/Berlin [default: UTC].
    #[arg(long, value_name = "ZONE", requires = "cron")]
    timezone: Option<String>,
    /// Run the command in this sandbox: name or id.
    #[arg(long, group = "what", requires = "command")]
    sandbox: Option<SandboxRef>,
    /// Take a snapshot of this sandbox: name or id.
    #[arg(long, group = "what", value_name = "SANDBOX", conflicts_with = "command")]
    snapshot: Option<SandboxRef>,
    /// Begin an execution of this job.
    #[arg(long, group = "what", value_name = "JOB", conflicts_with = "command")]
    job: Option<Name>,
    /// How many tasks the execution has, without input [default: 1].
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["sandbox", "snapshot"])]
    count: Option<usize>,
    /// Of the snapshots that it took, keep the newest so many [default: all].
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["sandbox", "job"])]
    keep: Option<u32>,
    /// Snapshots of files only.
    #[arg(long, conflicts_with_all = ["sandbox", "job"])]
    files_only: bool,
    /// Variable of the command.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env, conflicts_with_all = ["snapshot", "job"])]
    env: Vec<(String, String)>,
    /// Directory of the command.
    #[arg(short = 'w', long, value_name = "PATH", conflicts_with_all = ["snapshot", "job"])]
    cwd: Option<String>,
    /// User of the command.
    #[arg(short, long, conflicts_with_all = ["snapshot", "job"])]
    user: Option<String>,
    /// End the command after this long [default: 1h].
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, conflicts_with_all = ["snapshot", "job"])]
    timeout: Option<Duration>,
    /// If the time before is still being done.
    #[arg(long, value_enum, default_value_t = OverlapWord::Skip)]
    overlap: OverlapWord,
    /// Of times that passed while no daemon ran, do the last one, none, or all.
    #[arg(long, value_enum, default_value_t = MissedWord::One)]
    missed: MissedWord,
    /// A time that is later than this is missed.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    start_within: Option<Duration>,
    /// Put every time off by a random part of this.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    jitter: Option<Duration>,
    /// Do not fire until it is resumed.
    #[arg(long)]
    paused: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
    /// Program and arguments, after --.
    #[arg(last = true)]
    command: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OverlapWord {
    Skip,
    Allow,
    Replace,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum MissedWord {
    One,
    None,
    All,
}

impl Create {
    fn request(self) -> CreateSchedule {
        let when = match (self.cron, self.every, self.at) {
            (Some(cron), ..) => When::Cron(cron),
            (None, Some(every), _) => When::EveryMs(millis(every)),
            (None, None, Some(at_ms)) => When::At(Instant(at_ms)),
            (None, None, None) => When::AfterMs(millis(self.after.unwrap_or_default())),
        };
        let action = match (self.snapshot, self.job) {
            (None, Some(job)) => Does::Job(Box::new(BeginExecution {
                job: Some(job),
                count: Some(self.count.unwrap_or(1)),
                ..BeginExecution::default()
            })),
            (Some(sandbox), _) => Does::Snapshot(ScheduledSnapshot {
                sandbox: sandbox.to_string(),
                kind: if self.files_only { SnapshotKind::Filesystem } else { SnapshotKind::Memory },
                keep: self.keep,
            }),
            (None, None) => Does::Run(ScheduledRun {
                sandbox: self.sandbox.map(|sandbox| sandbox.to_string()).unwrap_or_default(),
                command: Command {
                    command: self.command,
                    env: self.env.into_iter().collect(),
                    cwd: self.cwd,
                    user: self.user,
                    timeout_ms: self.timeout.map(millis),
                    ..Command::default()
                },
            }),
        };
        CreateSchedule {
            name: self.name,
            when,
            timezone: self.timezone,
            action,
            overlap: match self.overlap {
                OverlapWord::Skip => Overlap::Skip,
                OverlapWord::Allow => Overlap::Allow,
                OverlapWord::Replace => Overlap::Replace,
            },
            missed: match self.missed {
                MissedWord::One => Missed::One,
                MissedWord::None => Missed::None,
                MissedWord::All => Missed::All,
            },
            start_within_ms: self.start_within.map(millis),
            jitter_ms: self.jitter.map(millis).unwrap_or_default(),
            paused: self.paused,
        }
    }
}

fn route(schedule: &ScheduleRef) -> Route {
    Route::new("/v1/schedules").part(&schedule.to_string())
}

impl Schedule {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Create(create) => {
                let json = create.json;
                let made: Kept =
                    client.post(&Route::new("/v1/schedules"), &create.request()).await?;
                output::show_line(json, &made, made.spec.name.as_str())?;
            }
            Action::Ls { json } => {
                let list: ScheduleList = client.list(&Route::new("/v1/schedules")).await?;
                output::show(json, &list, || table(&list.schedules, units::now_ms()))?;
            }
            Action::Show { schedule, json } => {
                let found: Kept = client.get(&route(&schedule)).await?;
                output::show(json, &found, || output::fields(&describe(&found, units::now_ms())))?;
            }
            Action::Rm { schedules, force } => {
                remove(client, &schedules, route, force, ErrorCode::NotFound).await?;
            }
            Action::Pause { schedule } => {
                let known: Kept = client.post(&route(&schedule).then("/pause"), &()).await?;
                output::line(known.spec.name.as_str())?;
            }
            Action::Resume { schedule } => {
                let known: Kept = client.post(&route(&schedule).then("/resume"), &()).await?;
                output::line(&format!("{}: {}", known.spec.name, next(&known, units::now_ms())))?;
            }
            Action::Run { schedule } => {
                let fired: Firing = client.post(&route(&schedule).then("/run"), &()).await?;
                output::line(&format!("{}: {}", fired.id, fired.state.as_str()))?;
            }
            Action::History { schedule, json } => {
                let list: FiringList = client.list(&route(&schedule).then("/firings")).await?;
                output::show(json, &list, || history(&list.firings))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// When it fires next: `in 3h (2027-01-31T03:00:00Z)`.
fn next(schedule: &Kept, now_ms: u64) -> String {
    match schedule.next_at_ms {
        Some(at_ms) => {
            let until = Duration::from_millis(at_ms.saturating_sub(now_ms));
            format!("in {} ({})", units::show_duration(until), units::show_time(at_ms))
        }
        None if schedule.spec.paused => "paused".to_owned(),
        None => "never again".to_owned(),
    }
}

fn when(schedule: &Kept) -> String {
    let CreateSchedule { when, timezone, .. } = &schedule.spec;
    match when {
        When::Cron(text) => {
            let zone = timezone.as_deref().map(|zone| format!(" {zone}")).unwrap_or_default();
            plain(&format!("{text}{zone}"))
        }
        When::EveryMs(ms) => format!("every {}", units::show_duration(Duration::from_millis(*ms))),
        When::At(at) => format!("at {}", units::show_time(at.0)),
        When::AfterMs(ms) => format!("after {}", units::show_duration(Duration::from_millis(*ms))),
    }
}

fn does(schedule: &Kept) -> String {
    match &schedule.spec.action {
        Does::Run(run) => {
            let command = output::command_line(&run.command.command, 40);
            format!("{}: {command}", plain(&run.sandbox))
        }
        Does::Job(begin) => {
            let name = begin.job.as_ref().map_or("a job", |name| name.as_str());
            format!("job {}", plain(name))
        }
        Does::Snapshot(ScheduledSnapshot { sandbox, keep, .. }) => {
            let keep = keep.map(|keep| format!(", keep {keep}")).unwrap_or_default();
            format!("snapshot of {}{keep}", plain(sandbox))
        }
    }
}

fn table(schedules: &[Kept], now_ms: u64) -> String {
    let row = |schedule: &Kept| {
        let last = schedule.last.as_ref().map(|last| last.state.as_str().to_owned());
        vec![
            schedule.spec.name.to_string(),
            when(schedule),
            next(schedule, now_ms),
            last.unwrap_or_else(|| "-".to_owned()),
            does(schedule),
        ]
    };
    let header = ["NAME", "WHEN", "NEXT", "LAST", "DOES"];
    output::table(&header, schedules.iter().map(row).collect())
}

fn describe(schedule: &Kept, now_ms: u64) -> Vec<(&'static str, String)> {
    let spec = &schedule.spec;
    let overlap = match spec.overlap {
        Overlap::Skip => "skipped",
        Overlap::Allow => "done beside each other",
        Overlap::Replace => "replaced",
    };
    let missed = match spec.missed {
        Missed::One => "the last is done",
        Missed::None => "none is done",
        Missed::All => "all are done",
    };
    let mut fields = vec![
        ("name", spec.name.to_string()),
        ("id", schedule.id.to_string()),
        ("when", when(schedule)),
        ("next", next(schedule, now_ms)),
        ("does", does(schedule)),
        ("overlapping", overlap.to_owned()),
        ("missed", missed.to_owned()),
    ];
    if let Some(within) = spec.start_within_ms {
        fields.push(("start within", units::show_duration(Duration::from_millis(within))));
    }
    if spec.jitter_ms > 0 {
        fields.push(("jitter", units::show_duration(Duration::from_millis(spec.jitter_ms))));
    }
    if let Some(last) = &schedule.last {
        fields.push(("last", format!("{} {}", units::show_time(last.fire_at_ms), outcome(last))));
    }
    fields.push(("created", units::show_time(schedule.created_at_ms)));
    fields
}

/// How a firing stands, and why.
fn outcome(firing: &Firing) -> String {
    let found = &firing.outcome;
    let words = [
        Some(firing.state.as_str().to_owned()),
        found.exit.map(|exit| format!("exit {exit}")),
        found.result.as_deref().map(plain),
        found.message.as_deref().map(plain),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn history(firings: &[Firing]) -> String {
    let row = |firing: &Firing| {
        let took = firing.ended_at_ms.map(|ended| ended.saturating_sub(firing.started_at_ms));
        vec![
            units::show_time(firing.fire_at_ms),
            if firing.manual { "asked for" } else { "-" }.to_owned(),
            took.map_or_else(|| "-".to_owned(), |took| units::show_millis(took as f64)),
            outcome(firing),
        ]
    };
    let header = ["TIME", "BY", "TOOK", "OUTCOME"];
    output::table(&header, firings.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        action: Action,
    }

    #[test]
    fn what_nothing_would_come_of_is_refused() {
        let parsed = |what: &str, about: &str| {
            let line = format!("schedule create a --every 1h {about} {what}");
            Line::try_parse_from(line.split_whitespace())
        };
        let (run, job, snapshot) = ("--sandbox web -- true", "--job b", "--snapshot web");
        let [command, tasks, kept] = [
            &["--env A=1", "--cwd /", "--user root", "--timeout 5m"][..],
            &["--count 2"],
            &["--keep 2", "--files-only"],
        ];
        for (what, fits, others) in [
            (run, command, [tasks, kept]),
            (job, tasks, [command, kept]),
            (snapshot, kept, [command, tasks]),
        ] {
            parsed(what, &fits.join(" ")).unwrap();
            for about in others.concat() {
                parsed(what, about).unwrap_err();
            }
        }
        parsed("--sandbox web", "").unwrap_err();
        parsed(job, "--cron *").unwrap_err();
    }
}
