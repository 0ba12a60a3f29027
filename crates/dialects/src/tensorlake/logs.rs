//! What processes of a sandbox said, kept on the host: nobody is woken for it, and one that is gone is
//! remembered by its id.
//!
//! - Standard output is of level info, standard error of level error; there are no others.
//! - Times are Unix microseconds, the finest that the clients' own parser of times understands.
//! - A process is named by its pid and start time.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use torpor_protocol::guest::LogLine;
use torpor_protocol::{SandboxId, SandboxRef, State as SandboxState};
use torpor_service::{Search, Service};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::Query;

use super::NAMESPACE;
use super::extract::Place;
use super::gate::{find, missing};
use super::info::fnv;

/// Lines in one page, unless the client asks for another number up to the other.
const PAGE: usize = 1000;
const PAGE_MAX: usize = 10_000;
/// More than a journal holds: all of it is looked through for a text.
const ALL: usize = 200_000;
const INFO: i8 = 3;
const ERROR: i8 = 5;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/sandboxes/{sandbox}/logs", get(logs))
        .route("/sandboxes/{sandbox}/processes", get(processes))
}

/// Which lines are asked for.
#[derive(Debug, Default, PartialEq)]
struct Wanted {
    search: Search,
    /// In small letters.
    body: Option<String>,
    /// Something was asked for that no line has.
    none: bool,
}

impl Wanted {
    fn parse(pairs: Vec<(String, String)>) -> Result<Self> {
        let mut wanted = Self::default();
        let (mut levels, mut processes) = (Vec::new(), Vec::new());
        let (mut head, mut tail) = (None, None);
        for (key, value) in pairs {
            let bad = || ApiError::invalid(format!("{key}={value:.80} can't be read"));
            match key.as_str() {
                "level" => levels.push(value.parse::<i8>().map_err(|_| bad())?),
                "processId" => processes.push(value),
                "nextToken" if value.is_empty() => {}
                "nextToken" => wanted.search.after_us = value.parse().map_err(|_| bad())?,
                "head" => head = Some(value.parse::<usize>().map_err(|_| bad())?),
                "tail" => tail = Some(value.parse::<usize>().map_err(|_| bad())?),
                "body" if value.is_empty() => {}
                "body" => wanted.body = Some(value.to_lowercase()),
                _ => {}
            }
        }
        wanted.search.limit = tail.or(head).unwrap_or(PAGE).min(PAGE_MAX);
        wanted.search.newest = tail.is_some();
        wanted.choose_levels(&levels);
        wanted.choose_processes(&processes);
        Ok(wanted)
    }

    fn choose_levels(&mut self, levels: &[i8]) {
        match (levels.contains(&INFO), levels.contains(&ERROR)) {
            (true, true) => {}
            (info, error) if info || error => self.search.stderr = Some(error),
            _ => self.none |= !levels.is_empty(),
        }
    }

    fn choose_processes(&mut self, ids: &[String]) {
        self.search.processes = ids.iter().filter_map(|id| process_of(id)).collect();
        self.none |= self.search.processes.is_empty() && !ids.is_empty();
    }

    async fn lines(&self, service: &Service, id: &SandboxId) -> Result<Vec<LogLine>> {
        let Some(text) = &self.body else { return Ok(service.fleet.log(id, &self.search).await?) };
        let all = Search { limit: ALL, newest: false, ..self.search.clone() };
        let mut found = service.fleet.log(id, &all).await?;
        found.retain(|line| line.text.to_lowercase().contains(text));
        let limit = self.search.limit;
        if self.search.newest {
            found.drain(..found.len().saturating_sub(limit));
        }
        found.truncate(limit);
        Ok(found)
    }
}

fn process_id(pid: u32, started_at_ms: u64) -> String {
    format!("{pid}-{started_at_ms}")
}

fn process_of(id: &str) -> Option<(u32, u64)> {
    let (pid, started_at_ms) = id.split_once('-')?;
    Some((pid.parse().ok()?, started_at_ms.parse().ok()?))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Logs {
    logs: Vec<Line>,
    next_token: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    timestamp: u64,
    uuid: String,
    namespace: &'static str,
    application: &'static str,
    sandbox_id: SandboxId,
    resource_attributes: Vec<(&'static str, String)>,
    body: String,
    /// If anything is in it, programs show it instead of the body.
    log_attributes: &'static str,
    allocations: [(); 0],
    function_runs: [(); 0],
    level: i8,
    retention: Option<i8>,
}

impl Line {
    fn of(line: LogLine, sandbox: &SandboxId) -> Self {
        let mut about = vec![
            ("process.id", process_id(line.pid, line.started_at_ms)),
            ("process.pid", line.pid.to_string()),
            ("process.command", line.command),
        ];
        about.extend(line.name.map(|name| ("process.managed.name", name)));
        Self {
            timestamp: line.stamp_us,
            uuid: uuid(sandbox, line.stamp_us),
            namespace: NAMESPACE,
            application: "",
            sandbox_id: sandbox.clone(),
            resource_attributes: about,
            body: line.text,
            log_attributes: "{}",
            allocations: [],
            function_runs: [],
            level: if line.stderr { ERROR } else { INFO },
            retention: None,
        }
    }
}

/// Always the same for the same line: no two lines of a sandbox have the same stamp.
fn uuid(sandbox: &SandboxId, stamp_us: u64) -> String {
    // Version 8: the bits are our own.
    let high = fnv(sandbox.as_str().bytes()) & !0xf000 | 0x8000;
    let low = stamp_us & (u64::MAX >> 2) | 1 << 63;
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

/// The sandbox whose lines are asked for. None: it is there and has none yet, as it never ran.
fn talker(service: &Service, text: &str) -> Result<Option<SandboxId>> {
    match find(service, text) {
        Ok(sandbox) => {
            let runs = sandbox.watch().borrow().state != SandboxState::Creating;
            Ok(runs.then(|| sandbox.id().clone()))
        }
        Err(error) => match text.parse().map_err(|_| missing(text))? {
            SandboxRef::Id(id) => Ok(Some(id)),
            SandboxRef::Name(_) => Err(error),
        },
    }
}

async fn logs(
    State(service): State<Arc<Service>>,
    Place(text): Place,
    Query(pairs): Query<Vec<(String, String)>>,
) -> Result<Json<Logs>> {
    let wanted = Wanted::parse(pairs)?;
    let Some(id) = talker(&service, &text)? else {
        return Ok(Json(Logs { logs: Vec::new(), next_token: None }));
    };
    let mut lines = wanted.lines(&service, &id).await?;
    if wanted.none {
        lines.clear();
    }
    let Search { limit, newest, .. } = wanted.search;
    let full = lines.len() == limit && !newest;
    let next_token = lines.last().filter(|_| full).map(|line| line.stamp_us.to_string());
    let logs = lines.into_iter().map(|line| Line::of(line, &id)).collect();
    Ok(Json(Logs { logs, next_token }))
}

#[derive(Debug, Serialize)]
struct Processes {
    processes: Vec<Process>,
}

#[derive(Debug, Serialize, PartialEq)]
#[serde(rename_all = "camelCase")]
struct Process {
    process_id: String,
    process_pid: String,
    process_command: String,
    process_managed_id: String,
    process_managed_name: String,
    first_seen: u64,
    last_seen: u64,
    log_count: usize,
}

async fn processes(
    State(service): State<Arc<Service>>,
    Place(text): Place,
) -> Result<Json<Processes>> {
    let Some(id) = talker(&service, &text)? else {
        return Ok(Json(Processes { processes: Vec::new() }));
    };
    let search = Search { limit: PAGE_MAX, newest: true, ..Search::default() };
    let lines = service.fleet.log(&id, &search).await?;
    Ok(Json(Processes { processes: speakers(lines) }))
}

/// Who said these lines, in the order of their first.
fn speakers(lines: Vec<LogLine>) -> Vec<Process> {
    let mut known = BTreeMap::<(u32, u64), Process>::new();
    for line in lines {
        let process = known.entry((line.pid, line.started_at_ms)).or_insert_with(|| {
            let name = line.name.unwrap_or_default();
            Process {
                process_id: process_id(line.pid, line.started_at_ms),
                process_pid: line.pid.to_string(),
                process_command: line.command,
                process_managed_id: name.clone(),
                process_managed_name: name,
                first_seen: line.stamp_us,
                last_seen: line.stamp_us,
                log_count: 0,
            }
        });
        process.last_seen = line.stamp_us;
        process.log_count += 1;
    }
    let mut all: Vec<_> = known.into_values().collect();
    all.sort_by_key(|process| process.first_seen);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(pairs: &[(&str, &str)]) -> Result<Wanted> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Wanted::parse(pairs.collect())
    }

    fn line(stamp_us: u64, pid: u32) -> LogLine {
        LogLine {
            stamp_us,
            pid,
            started_at_ms: 7,
            command: "sh".into(),
            name: None,
            stderr: false,
            text: "hello".into(),
        }
    }

    #[test]
    fn levels_are_streams() {
        let of = |levels: &[&str]| {
            let pairs: Vec<_> = levels.iter().map(|level| ("level", *level)).collect();
            let wanted = wanted(&pairs).unwrap();
            (wanted.search.stderr, wanted.none)
        };
        assert_eq!(of(&[]), (None, false));
        assert_eq!(of(&["3"]), (Some(false), false));
        assert_eq!(of(&["5", "4"]), (Some(true), false));
        assert_eq!(of(&["3", "5"]), (None, false));
        assert_eq!(of(&["6"]), (None, true));
        assert!(wanted(&[("level", "loud")]).is_err());
    }

    #[test]
    fn a_process_that_can_not_be_one_said_nothing() {
        let one = wanted(&[("processId", "12-99"), ("processId", "p1")]).unwrap();
        assert_eq!((one.search.processes, one.none), (vec![(12, 99)], false));
        assert!(wanted(&[("processId", "p1")]).unwrap().none);
    }

    #[test]
    fn a_page_has_a_size_and_a_place() {
        let page = wanted(&[("tail", "5"), ("nextToken", "42"), ("newer", "x")]).unwrap();
        assert_eq!(page.search.limit, 5);
        assert!(page.search.newest);
        assert_eq!(page.search.after_us, 42);
        assert_eq!(wanted(&[("head", "99999999")]).unwrap().search.limit, PAGE_MAX);
        for wrong in [("head", "-1"), ("tail", "x"), ("nextToken", "x")] {
            assert!(wanted(&[wrong]).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_line_has_always_the_same_uuid_and_shares_it_with_no_other() {
        let (one, other) = ("a".repeat(21).parse().unwrap(), "b".repeat(21).parse().unwrap());
        let first = uuid(&one, 1_800_000_000_000_000);
        assert_eq!(first, uuid(&one, 1_800_000_000_000_000));
        assert_ne!(first, uuid(&one, 1_800_000_000_000_001));
        assert_ne!(first, uuid(&other, 1_800_000_000_000_000));
        let groups: Vec<_> = first.split('-').map(str::len).collect();
        assert_eq!(groups, [8, 4, 4, 4, 12]);
        assert_eq!((&first[14..15], &first[19..20]), ("8", "8"));
    }

    #[test]
    fn speakers_are_told_in_the_order_of_their_first_word() {
        let found = speakers(vec![line(1, 20), line(2, 10), line(3, 20)]);
        let found: Vec<_> = found
            .iter()
            .map(|process| (&*process.process_id, process.first_seen, process.log_count))
            .collect();
        assert_eq!(found, [("20-7", 1, 2), ("10-7", 2, 1)]);
    }
}
