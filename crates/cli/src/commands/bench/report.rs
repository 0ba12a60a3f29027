//! The figures, as a short table and as JSON.

use serde::Serialize;

use super::load::Summary;
use super::machine::Machine;
use crate::output;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    latencies: Vec<Latency>,
    figures: Vec<Figure>,
}

#[derive(Debug, Serialize)]
struct Latency {
    name: String,
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

impl Report {
    pub(super) fn new(machine: Machine) -> Self {
        Self { machine, latencies: Vec::new(), figures: Vec::new() }
    }

    pub(super) fn latency(&mut self, name: impl Into<String>, summary: Summary) {
        self.latencies.push(Latency { name: name.into(), summary });
    }

    pub(super) fn figure(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.figures.push(Figure { name: name.into(), value, unit });
    }

    pub(super) fn table(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "torpor {} on {}\n{} × {}, {} GiB, Linux {}, load {}\n\n",
            machine.torpor,
            machine.engine,
            machine.cores,
            machine.processor,
            machine.memory_gib,
            machine.kernel,
            machine.load
        );
        if !self.latencies.is_empty() {
            let rows = self.latencies.iter().map(Latency::row).collect::<Vec<_>>();
            let heads = ["MILLISECONDS", "COUNT", "MIN", "P50", "P95", "P99", "MAX"];
            text.push_str(&output::table(&heads, rows));
            text.push('\n');
        }
        if !self.figures.is_empty() {
            let rows = self.figures.iter().map(Figure::row).collect::<Vec<_>>();
            text.push_str(&output::table(&["FIGURE", "VALUE", "UNIT"], rows));
        }
        text
    }
}

impl Latency {
    fn row(&self) -> Vec<String> {
        let Summary { count, min, p50, p95, p99, max } = &self.summary;
        let mut row = vec![self.name.clone(), count.to_string()];
        row.extend([min, p50, p95, p99, max].map(|ms| format!("{ms:.1}")));
        row
    }
}

impl Figure {
    fn row(&self) -> Vec<String> {
        vec![self.name.clone(), format!("{:.1}", self.value), self.unit.to_owned()]
    }
}
