//! Numbers for Prometheus. No label has a value per sandbox: their number must not grow with use.

mod mcp;
mod outbox;
mod pools;

use std::sync::atomic::Ordering;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use torpor_egress::{Counts, Verdicts};
use torpor_lifecycle::engine::About;
use torpor_lifecycle::{Cause, Fleet, Observer, Tally};
use torpor_protocol::invocation::InvocationState;
use torpor_protocol::{State, Tier};
use torpor_store::{Next, OutboxLength};

/// From a tenth of a millisecond to a minute.
const SECONDS: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0,
];

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

pub struct Metrics {
    registry: Registry,
    created: Counter,
    deleted: Counter,
    failed: Counter,
    create_seconds: Histogram,
    run_seconds: Histogram,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Histograms<RouteLabels>,
    bytes: Family<DirectionLabels, Counter>,
    agent_gone: Counter,
    sandboxes: Family<StateLabels, Gauge>,
    sleeping: Family<TierLabels, Gauge>,
    sleeps: Counter,
    sleep_seconds: Histograms<TierLabels>,
    saves: Counter,
    wakes: Family<TierLabels, Counter>,
    wake_seconds: Histograms<TierLabels>,
    demotions: Family<CauseLabels, Counter>,
    lookups: Counter,
    leases: Counter,
    snapshots: Counter,
    snapshot_seconds: Histogram,
    pause_seconds: Histogram,
    forks: Counter,
    saved_bytes: Gauge,
    pools: pools::Pools,
    egress: Egress,
    mcp: mcp::McpCalls,
    throttled: Counter,
    tasks: Tasks,
    outbox: outbox::Outbox,
    certificates: Gauge,
    resident_bytes: Gauge,
    open_files: Gauge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    method: String,
    route: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabels {
    direction: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    tier: &'static str,
}

impl From<Tier> for TierLabels {
    fn from(tier: Tier) -> Self {
        Self { tier: tier.as_str() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

/// What becomes of tasks of jobs.
#[derive(Default)]
struct Tasks {
    attempts: Family<OutcomeLabels, Counter>,
    queued: Gauge,
    running: Gauge,
}

impl Tasks {
    fn register(&self, registry: &mut Registry) {
        let help = "Attempts at tasks of jobs, by what became of the task";
        registry.register("task_attempts", help, self.attempts.clone());
        registry.register("tasks_queued", "Tasks of jobs that wait", self.queued.clone());
        registry.register("tasks_running", "Tasks of jobs that run", self.running.clone());
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EgressLabels {
    kind: &'static str,
    verdict: &'static str,
}

/// What became of what sandboxes sent out.
#[derive(Default)]
struct Egress {
    events: Family<EgressLabels, Counter>,
    secret_uses: Counter,
}

impl Egress {
    fn register(&self, registry: &mut Registry) {
        let help = "Decisions about what sandboxes sent out";
        registry.register("egress_events", help, self.events.clone());
        let help = "Secrets put into requests on their way out";
        registry.register("egress_secret_uses", help, self.secret_uses.clone());
    }

    fn set(&self, counts: &Counts) {
        for (kind, verdicts) in &counts.by_kind {
            let Verdicts { allowed, denied, failed } = *verdicts;
            for (verdict, count) in [("allowed", allowed), ("denied", denied), ("failed", failed)] {
                let labels = EgressLabels { kind, verdict };
                self.events.get_or_create(&labels).inner().store(count, Ordering::Relaxed);
            }
        }
        self.secret_uses.inner().store(counts.secret_uses, Ordering::Relaxed);
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn histogram() -> Histogram {
    Histogram::new(SECONDS)
}

impl Metrics {
    /// The first engine is the default.
    pub fn new<'a>(engines: impl Iterator<Item = &'a About>) -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("torpor"),
            created: Counter::default(),
            deleted: Counter::default(),
            failed: Counter::default(),
            create_seconds: histogram(),
            run_seconds: histogram(),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(histogram),
            bytes: Family::default(),
            agent_gone: Counter::default(),
            sandboxes: Family::default(),
            sleeping: Family::default(),
            sleeps: Counter::default(),
            sleep_seconds: Family::new_with_constructor(histogram),
            saves: Counter::default(),
            wakes: Family::default(),
            wake_seconds: Family::new_with_constructor(histogram),
            demotions: Family::default(),
            lookups: Counter::default(),
            leases: Counter::default(),
            snapshots: Counter::default(),
            snapshot_seconds: histogram(),
            pause_seconds: histogram(),
            forks: Counter::default(),
            saved_bytes: Gauge::default(),
            pools: pools::Pools::default(),
            egress: Egress::default(),
            mcp: mcp::McpCalls::default(),
            throttled: Counter::default(),
            tasks: Tasks::default(),
            outbox: outbox::Outbox::default(),
            certificates: Gauge::default(),
            resident_bytes: Gauge::default(),
            open_files: Gauge::default(),
        };
        metrics.register();
        metrics.register_standby();
        let all: Vec<&About> = engines.collect();
        let joined = |of: fn(&About) -> &str| {
            all.iter().map(|about| of(about)).collect::<Vec<_>>().join("; ")
        };
        let labels = vec![
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("engine", joined(|about| about.kind)),
            ("engine_version", joined(|about| &about.version)),
        ];
        metrics.registry.register("build", "What runs", Info::new(labels));
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        let seconds = Unit::Seconds;
        registry.register("sandboxes", "Sandboxes by state", self.sandboxes.clone());
        registry.register("sandboxes_created", "Sandboxes created", self.created.clone());
        registry.register("sandboxes_deleted", "Sandboxes ended", self.deleted.clone());
        registry.register("sandboxes_failed", "Sandboxes that failed", self.failed.clone());
        registry.register_with_unit(
            "create",
            "From the request to a running sandbox",
            seconds.clone(),
            self.create_seconds.clone(),
        );
        registry.register_with_unit(
            "run",
            "From the request for a command to its end",
            seconds.clone(),
            self.run_seconds.clone(),
        );
        registry.register("http_requests", "Requests answered", self.requests.clone());
        registry.register_with_unit(
            "http_request",
            "From the head of a request to the head of its answer",
            seconds,
            self.request_seconds.clone(),
        );
        registry.register("transferred_bytes", "File content moved", self.bytes.clone());
        let throttled = self.throttled.clone();
        registry.register("throttled_requests", "Requests of keys that asked too often", throttled);
        registry.register("agent_gone", "Requests that lost their agent", self.agent_gone.clone());
        registry.register_with_unit(
            "process_resident_memory",
            "Memory of the daemon",
            Unit::Bytes,
            self.resident_bytes.clone(),
        );
        let certificates = self.certificates.clone();
        registry.register("certificates", "Valid certificates got from a directory", certificates);
        registry.register("process_open_fds", "Open files of the daemon", self.open_files.clone());
    }

    fn register_standby(&mut self) {
        let registry = &mut self.registry;
        let (seconds, bytes) = (Unit::Seconds, Unit::Bytes);
        registry.register("sandboxes_standby", "Sleeping sandboxes", self.sleeping.clone());
        registry.register("sleeps", "Sandboxes that fell asleep", self.sleeps.clone());
        registry.register("saves", "Sleeping sandboxes that became durable", self.saves.clone());
        registry.register("wakes", "Sandboxes that woke, by how they slept", self.wakes.clone());
        registry.register("demotions", "Made to leave memory, by cause", self.demotions.clone());
        registry.register("lookups", "Sandboxes looked up", self.lookups.clone());
        registry.register("leases", "Requests for a running machine", self.leases.clone());
        registry.register("snapshots", "Snapshots taken", self.snapshots.clone());
        registry.register("forks", "Sandboxes begun by forks", self.forks.clone());
        let histograms = [
            ("sleep", "From being told to sleep to being durable", self.sleep_seconds.clone()),
            (
                "wake",
                "From a request to a sleeping sandbox to its lease",
                self.wake_seconds.clone(),
            ),
        ];
        for (name, help, histogram) in histograms {
            registry.register_with_unit(name, help, seconds.clone(), histogram);
        }
        let histograms = [
            ("snapshot", "From the request to a complete snapshot", self.snapshot_seconds.clone()),
            ("snapshot_pause", "How long a sandbox stood still", self.pause_seconds.clone()),
        ];
        for (name, help, histogram) in histograms {
            registry.register_with_unit(name, help, seconds.clone(), histogram);
        }
        let saved = self.saved_bytes.clone();
        registry.register_with_unit("saves_on_disk", "All saved moments together", bytes, saved);
        self.pools.register(registry);
        self.egress.register(registry);
        self.tasks.register(registry);
        self.outbox.register(registry);
        self.mcp.register(registry);
    }

    // === What happened ===

    pub fn created(&self, took: Duration) {
        self.created.inc();
        self.create_seconds.observe(took.as_secs_f64());
    }

    /// A call through the MCP gateway ended; whether it was of something that an operator approved.
    pub fn mcp_called(&self, call: &torpor_protocol::mcp_gateway::McpCall, known: bool) {
        self.mcp.note(call, known);
    }

    pub fn ran(&self, took: Duration) {
        self.run_seconds.observe(took.as_secs_f64());
    }

    pub fn answered(&self, method: &str, route: &str, status: u16, took: Duration) {
        // Anybody can send any method; a label must not be anything.
        let known = ["GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS"];
        let method = if known.contains(&method) { method } else { "other" }.to_owned();
        let route = route.to_owned();
        let labels = RouteLabels { method: method.clone(), route: route.clone() };
        self.request_seconds.get_or_create(&labels).observe(took.as_secs_f64());
        self.requests.get_or_create(&RequestLabels { method, route, status }).inc();
    }

    pub fn uploaded(&self, bytes: usize) {
        self.moved("up", bytes);
    }

    pub fn downloaded(&self, bytes: usize) {
        self.moved("down", bytes);
    }

    fn moved(&self, direction: &'static str, bytes: usize) {
        self.bytes.get_or_create(&DirectionLabels { direction }).inc_by(bytes as u64);
    }

    pub fn agent_gone(&self) {
        self.agent_gone.inc();
    }

    /// A key asked too often.
    pub fn throttled(&self) {
        self.throttled.inc();
    }

    /// A sandbox changed its state.
    pub fn entered(&self, state: State) {
        match state {
            State::Creating | State::Running => {}
            State::Asleep => {
                self.sleeps.inc();
            }
            State::Failed => {
                self.failed.inc();
            }
            State::Terminated => {
                self.deleted.inc();
            }
        }
    }

    /// A sleeping sandbox became durable.
    pub fn saved(&self) {
        self.saves.inc();
    }

    /// A sandbox woke so often since it was last looked at.
    pub fn woke(&self, from: Tier, times: u64) {
        self.wakes.get_or_create(&from.into()).inc_by(times);
    }

    /// A sandbox was asked to sleep and is durable.
    pub fn slept(&self, to: Tier, took: Duration) {
        self.sleep_seconds.get_or_create(&to.into()).observe(took.as_secs_f64());
    }

    /// A snapshot is complete; its sandbox stood still for so long.
    pub fn snapshot_taken(&self, took: Duration, pause_ms: f64) {
        self.snapshots.inc();
        self.snapshot_seconds.observe(took.as_secs_f64());
        self.paused(pause_ms);
    }

    /// A sandbox stood still to be saved. One that slept did not.
    pub fn paused(&self, pause_ms: f64) {
        if pause_ms > 0.0 {
            self.pause_seconds.observe(pause_ms / 1000.0);
        }
    }

    pub fn forked(&self) {
        self.forks.inc();
    }

    /// An attempt at a task of a job is over.
    pub(crate) fn task(&self, outcome: &'static str) {
        self.tasks.attempts.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// An invocation of a service is over.
    pub(crate) fn settled(&self, state: InvocationState) {
        self.outbox.settled(state);
    }

    /// An attempt to deliver something is over.
    pub(crate) fn tried(&self, next: &Next) {
        self.outbox.tried(next);
    }

    // === What is ===

    /// Invocations and deliveries that are not over.
    pub fn set_outbox(&self, length: OutboxLength) {
        self.outbox.set(length);
    }

    /// Tasks of jobs that are not over.
    pub fn set_queue(&self, queued: u64, running: u64) {
        self.tasks.queued.set(i64::try_from(queued).unwrap_or(i64::MAX));
        self.tasks.running.set(i64::try_from(running).unwrap_or(i64::MAX));
    }

    /// What became of what sandboxes sent out, since the start.
    pub fn set_egress(&self, counts: &Counts) {
        self.egress.set(counts);
    }

    pub fn certificates(&self, valid: usize) {
        self.certificates.set(number(valid));
    }

    /// The text that Prometheus reads.
    pub fn render(&self, fleet: &Fleet, saved_bytes: u64) -> Result<String, std::fmt::Error> {
        let now = fleet.survey(|status| (status.state, status.tier));
        for state in State::ALL {
            let count = now.iter().filter(|(is, _)| *is == state).count();
            let labels = StateLabels { state: state.as_str() };
            self.sandboxes.get_or_create(&labels).set(number(count));
        }
        for tier in [Tier::Warm, Tier::Cold] {
            let count = now.iter().filter(|(_, is)| *is == Some(tier)).count();
            self.sleeping.get_or_create(&tier.into()).set(number(count));
        }
        let Tally { lookups, leases } = fleet.tally();
        self.lookups.inner().store(lookups, Ordering::Relaxed);
        self.leases.inner().store(leases, Ordering::Relaxed);
        self.pools.set(&fleet.pools());
        self.saved_bytes.set(i64::try_from(saved_bytes).unwrap_or(i64::MAX));
        self.resident_bytes.set(resident_bytes().unwrap_or(0));
        self.open_files.set(open_files().unwrap_or(0));
        self.text()
    }

    pub(crate) fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Observer for Metrics {
    fn waited(&self, from: Tier, took: Duration) {
        self.wake_seconds.get_or_create(&from.into()).observe(took.as_secs_f64());
    }

    fn demoted(&self, cause: Cause) {
        self.demotions.get_or_create(&CauseLabels { cause: cause.as_str() }).inc();
    }
}

fn resident_bytes() -> Option<i64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: i64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * i64::try_from(rustix::param::page_size()).ok()?)
}

fn open_files() -> Option<i64> {
    i64::try_from(std::fs::read_dir("/proc/self/fd").ok()?.count()).ok()
}
