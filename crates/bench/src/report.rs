//! The figures, as short tables and as JSON.

use std::time::Duration;

use serde::Serialize;
use torpor_protocol::status::Step;

use crate::load::Summary;
use crate::machine::Machine;

/// The name of the step in which the engine reads a save back.
const RESTORE_STEP: &str = "restore";

#[derive(Debug, Serialize)]
pub struct Report {
    machine: Machine,
    latencies: Vec<Latency>,
    figures: Vec<Figure>,
    promises: Vec<Promise>,
    /// What could not be measured, and why.
    notes: Vec<String>,
    /// Load average at the end: ours, and others' work meanwhile.
    load_after: String,
}

/// What there was before the clock started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Start {
    /// Nothing was prepared.
    Nothing,
    /// An empty machine was ready.
    Prepared,
    /// A pool was full.
    Pool,
    Running,
    Warm,
    /// Frozen, and its memory is in swap.
    PagedOut,
    Cold,
    Snapshot,
}

impl Start {
    fn as_str(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Prepared => "prepared",
            Self::Pool => "pool",
            Self::Running => "running",
            Self::Warm => "warm",
            Self::PagedOut => "paged out",
            Self::Cold => "cold",
            Self::Snapshot => "snapshot",
        }
    }
}

#[derive(Debug, Serialize)]
struct Latency {
    name: String,
    start: Start,
    #[serde(flatten)]
    summary: Summary,
}

/// A number that is no latency.
#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
}

/// A number with a limit.
#[derive(Debug, Serialize)]
struct Promise {
    name: String,
    measured: f64,
    limit: f64,
    unit: &'static str,
    met: bool,
}

impl Report {
    pub(crate) fn new(machine: Machine) -> Self {
        let (latencies, figures, promises) = (Vec::new(), Vec::new(), Vec::new());
        let (notes, load_after) = (Vec::new(), String::new());
        Self { machine, latencies, figures, promises, notes, load_after }
    }

    /// Nothing is measured any more.
    pub(crate) fn end(&mut self) {
        self.load_after = crate::machine::load();
    }

    pub(crate) fn latency(&mut self, name: impl Into<String>, start: Start, summary: Summary) {
        self.latencies.push(Latency { name: name.into(), start, summary });
    }

    /// A latency whose p50 has a limit.
    pub(crate) fn promised(&mut self, name: String, start: Start, summary: Summary, p50_max: f64) {
        self.at_most(&format!("{name}, p50"), summary.p50, p50_max, "ms");
        self.latency(name, start, summary);
    }

    pub(crate) fn figure(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.figures.push(Figure { name: name.into(), value, unit });
    }

    pub(crate) fn at_most(&mut self, name: &str, measured: f64, limit: f64, unit: &'static str) {
        self.promise(name, measured, limit, unit, measured <= limit);
    }

    pub(crate) fn at_least(&mut self, name: &str, measured: f64, limit: f64, unit: &'static str) {
        self.promise(name, measured, limit, unit, measured >= limit);
    }

    fn promise(&mut self, name: &str, measured: f64, limit: f64, unit: &'static str, met: bool) {
        // What is promised is promised of the product's speed.
        if self.machine.emulated {
            return;
        }
        self.promises.push(Promise { name: name.to_owned(), measured, limit, unit, met });
    }

    pub(crate) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// For people; `draw` makes a table with these heads and rows.
    pub fn text(&self, draw: fn(&[&str], Vec<Vec<String>>) -> String) -> String {
        let Machine { torpor, engine, emulated, kernel, processor, cores, memory_gib, load } =
            &self.machine;
        let mut text = format!(
            "torpor {torpor} on {engine}\n{cores} × {processor}, {memory_gib} GiB, Linux {kernel}, \
             load {load} before and {} after\n",
            self.load_after
        );
        if *emulated {
            text.push_str(
                "EMULATED: guests run many times slower than with KVM; promises are not judged\n",
            );
        }
        let mut table = |heads: &[&str], rows: Vec<Vec<String>>| {
            if !rows.is_empty() {
                text.push('\n');
                text.push_str(&draw(heads, rows));
            }
        };
        table(
            &["MILLISECONDS", "START", "COUNT", "MIN", "P50", "P95", "P99", "MAX"],
            self.latencies.iter().map(Latency::row).collect(),
        );
        table(&["FIGURE", "VALUE", "UNIT"], self.figures.iter().map(Figure::row).collect());
        table(
            &["PROMISE", "MEASURED", "LIMIT", "UNIT", "MET"],
            self.promises.iter().map(Promise::row).collect(),
        );
        for note in &self.notes {
            text.push_str(&format!("\n{note}"));
        }
        if !self.notes.is_empty() {
            text.push('\n');
        }
        text
    }
}

impl Latency {
    fn row(&self) -> Vec<String> {
        let Summary { count, min, p50, p95, p99, max } = &self.summary;
        let start = self.start.as_str().to_owned();
        let mut row = vec![self.name.clone(), start, count.to_string()];
        row.extend([min, p50, p95, p99, max].map(|ms| format!("{ms:.1}")));
        row
    }
}

impl Figure {
    fn row(&self) -> Vec<String> {
        vec![self.name.clone(), number(self.value), self.unit.to_owned()]
    }
}

impl Promise {
    fn row(&self) -> Vec<String> {
        let met = if self.met { "yes" } else { "NO" };
        let (measured, limit) = (number(self.measured), number(self.limit));
        vec![self.name.clone(), measured, limit, self.unit.to_owned(), met.to_owned()]
    }
}

/// Ratios and small times need their hundredths.
fn number(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { format!("{value:.1}") }
}

/// Where the time of an operation goes, over several rounds.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    totals: Vec<Duration>,
    /// In the order in which they were first seen.
    steps: Vec<(String, Vec<Duration>)>,
    /// What the steps do not tell: the way through the API, the ledger, the answer.
    rest: Vec<Duration>,
}

impl Profile {
    pub(crate) fn add(&mut self, total: Duration, steps: &[Step]) {
        let mut told = Duration::ZERO;
        for Step { name, ms } in steps {
            let time = Duration::from_secs_f64(ms.max(0.0) / 1e3);
            told += time;
            match self.steps.iter_mut().find(|(known, _)| known == name) {
                Some((_, times)) => times.push(time),
                None => self.steps.push((name.clone(), vec![time])),
            }
        }
        self.totals.push(total);
        self.rest.push(total.saturating_sub(told));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.totals.is_empty()
    }

    /// What the engine's own restore takes: no wake and no fork can be quicker.
    pub(crate) fn floor(&self) -> Option<Summary> {
        let restore = self.steps.iter().find(|(name, _)| name == RESTORE_STEP);
        restore.map(|(_, times)| Summary::of(times))
    }

    /// Reports the whole; with `steps`, its parts below it.
    pub(crate) fn report(
        &self,
        report: &mut Report,
        name: &str,
        start: Start,
        steps: bool,
    ) -> Summary {
        let whole = Summary::of(&self.totals);
        report.latency(name, start, whole.clone());
        if steps && !self.steps.is_empty() {
            for (name, times) in &self.steps {
                report.latency(format!("  {name}"), start, Summary::of(times));
            }
            report.latency("  outside of these", start, Summary::of(&self.rest));
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_adds_up() {
        let step = |name: &str, ms| Step { name: name.to_owned(), ms };
        let mut profile = Profile::default();
        profile.add(Duration::from_millis(100), &[step("restore", 60.0), step("hello", 10.0)]);
        assert_eq!(profile.rest, [Duration::from_millis(30)]);
    }

    fn no_table(_: &[&str], _: Vec<Vec<String>>) -> String {
        String::new()
    }

    fn report_on(engine_version: &str) -> Report {
        let info = torpor_protocol::api::Info {
            version: "1".into(),
            installation: "x".into(),
            engine: "fake".into(),
            engine_version: engine_version.into(),
            sandboxes: 0,
            uptime_ms: 0,
        };
        Report::new(crate::machine::describe(&info))
    }

    #[test]
    fn on_an_emulated_engine_no_promise_is_judged_and_the_report_says_so() {
        let mut report = report_on("QEMU 10.0.2, tcg, processor max, kernel 6.12");
        report.at_most("a", 5.0, 5.0, "ms");
        assert!(report.promises.is_empty() && report.text(no_table).contains("EMULATED"));
        assert!(!report_on("QEMU 10.0.2, kvm, processor host").text(no_table).contains("EMULATED"));
    }

    #[test]
    fn a_promise_is_met_on_its_limit() {
        let mut report = report_on("1");
        report.at_most("a", 5.0, 5.0, "ms");
        report.at_most("b", 5.1, 5.0, "ms");
        report.at_least("c", 5.0, 5.0, "MB/s");
        let met: Vec<_> = report.promises.iter().map(|promise| promise.met).collect();
        assert_eq!(met, [true, false, true]);
    }
}
