//! Numbers for Prometheus. No label has a value per sandbox: their number must not grow with use.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use torpor_lifecycle::Fleet;
use torpor_protocol::State;

/// From a tenth of a millisecond to a minute.
const SECONDS: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0,
];

type Histograms = Family<RouteLabels, Histogram, fn() -> Histogram>;

pub struct Metrics {
    registry: Registry,
    created: Counter,
    deleted: Counter,
    failed: Counter,
    create_seconds: Histogram,
    run_seconds: Histogram,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Histograms,
    bytes: Family<DirectionLabels, Counter>,
    agent_gone: Counter,
    sandboxes: Family<StateLabels, Gauge>,
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

fn histogram() -> Histogram {
    Histogram::new(SECONDS)
}

impl Metrics {
    pub fn new(engine: &str, engine_version: &str) -> Self {
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
            resident_bytes: Gauge::default(),
            open_files: Gauge::default(),
        };
        metrics.register();
        let labels = vec![
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("engine", engine.to_owned()),
            ("engine_version", engine_version.to_owned()),
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
        registry.register("agent_gone", "Requests that lost their agent", self.agent_gone.clone());
        registry.register_with_unit(
            "process_resident_memory",
            "Memory of the daemon",
            Unit::Bytes,
            self.resident_bytes.clone(),
        );
        registry.register("process_open_fds", "Open files of the daemon", self.open_files.clone());
    }

    // === What happened ===

    pub fn created(&self, took: Duration) {
        self.created.inc();
        self.create_seconds.observe(took.as_secs_f64());
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

    /// A sandbox changed its state.
    pub fn entered(&self, state: State) {
        match state {
            State::Creating | State::Running => {}
            State::Failed => {
                self.failed.inc();
            }
            State::Terminated => {
                self.deleted.inc();
            }
        }
    }

    // === What is ===

    /// The text that Prometheus reads.
    pub fn render(&self, fleet: &Fleet) -> Result<String, std::fmt::Error> {
        let now = fleet.list();
        for state in State::ALL {
            let count = now.iter().filter(|status| status.state == state).count();
            let labels = StateLabels { state: state.as_str() };
            self.sandboxes.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        self.resident_bytes.set(resident_bytes().unwrap_or(0));
        self.open_files.set(open_files().unwrap_or(0));
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
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
