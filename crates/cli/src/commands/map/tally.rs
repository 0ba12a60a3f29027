//! What came of a `map`: results, times, and what they say together. Pure.

use serde::Serialize;
use torpor_protocol::api::{ExitReport, RunResult};

use crate::output::{self, plain};
use crate::units;

/// Longest first line that is shown whole.
const LINE_WIDTH: usize = 60;

/// One fork and its command.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Outcome {
    /// From 1.
    pub n: usize,
    /// Name or id; None: it could not be forked.
    pub sandbox: Option<String>,
    /// What the command did; None: it could not be run, and `error` says why.
    #[serde(flatten)]
    pub result: Option<RunResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Outcome {
    pub(super) fn succeeded(&self) -> bool {
        self.result.as_ref().is_some_and(|result| result.exit.exit_code == Some(0))
    }

    fn exit(&self) -> String {
        match self.result.as_ref().map(|result| result.exit) {
            None => "-".to_owned(),
            Some(ExitReport { timed_out: true, .. }) => "timed out".to_owned(),
            Some(ExitReport { exit_code: Some(code), .. }) => code.to_string(),
            Some(ExitReport { signal: Some(signal), .. }) => format!("signal {signal}"),
            Some(_) => "?".to_owned(),
        }
    }

    /// What it said first; of one that failed and said nothing, what it complained of first.
    fn first_line(&self) -> String {
        let first = |text: &str| {
            let line = text.lines().find(|line| !line.trim().is_empty());
            line.map(|line| output::cut(&plain(line.trim_end()), LINE_WIDTH))
        };
        let line = match (&self.result, &self.error) {
            (Some(result), _) => first(&result.stdout).or_else(|| first(&result.stderr)),
            (None, Some(error)) => first(error),
            (None, None) => None,
        };
        line.unwrap_or_else(|| "-".to_owned())
    }
}

/// All of them.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Tally {
    pub results: Vec<Outcome>,
    pub failed: usize,
    /// Until all forks were there.
    pub fork_ms: f64,
    /// The commands one after the other: the sum of their times.
    pub sequential_ms: f64,
    /// The commands as they were run: from the first's start to the last's end.
    pub parallel_ms: f64,
    /// How many times faster together than one after the other.
    pub speed_up: f64,
    /// Speed-up for each command that ran, 0 to 1.
    pub efficiency: f64,
}

impl Tally {
    pub(super) fn new(results: Vec<Outcome>, fork_ms: f64, parallel_ms: f64) -> Self {
        let ran = results.iter().filter_map(|outcome| outcome.result.as_ref());
        let count = ran.clone().count();
        let sequential_ms: f64 = ran.map(|result| result.duration_ms as f64).sum();
        let speed_up = if parallel_ms > 0.0 { sequential_ms / parallel_ms } else { 0.0 };
        let efficiency = if count > 0 { speed_up / count as f64 } else { 0.0 };
        let failed = results.iter().filter(|outcome| !outcome.succeeded()).count();
        Self { results, failed, fork_ms, sequential_ms, parallel_ms, speed_up, efficiency }
    }

    pub(super) fn text(&self) -> String {
        let row = |outcome: &Outcome| {
            let time = outcome.result.as_ref();
            vec![
                outcome.n.to_string(),
                outcome.sandbox.clone().unwrap_or_else(|| "-".to_owned()),
                outcome.exit(),
                time.map_or_else(|| "-".to_owned(), |r| units::show_millis(r.duration_ms as f64)),
                outcome.first_line(),
            ]
        };
        let header = ["N", "SANDBOX", "EXIT", "TIME", "OUTPUT"];
        let table = output::table(&header, self.results.iter().map(row).collect());
        let good = self.results.len() - self.failed;
        let summary = output::fields(&[
            ("succeeded", format!("{good} of {}", self.results.len())),
            ("forked in", units::show_millis(self.fork_ms)),
            (
                "one by one",
                format!("{} (sum of the times)", units::show_millis(self.sequential_ms)),
            ),
            ("together", units::show_millis(self.parallel_ms)),
            ("speed-up", format!("{:.2}", self.speed_up)),
            ("efficiency", format!("{:.0}%", self.efficiency * 100.0)),
        ]);
        format!("{table}\n{summary}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(n: usize, code: i32, duration_ms: u64, stdout: &str, stderr: &str) -> Outcome {
        let exit = ExitReport { exit_code: Some(code), ..ExitReport::default() };
        let (stdout, stderr) = (stdout.to_owned(), stderr.to_owned());
        let result = RunResult { exit, stdout, stderr, truncated: false, duration_ms };
        Outcome { n, sandbox: Some(format!("a-{n}")), result: Some(result), error: None }
    }

    fn missing(n: usize) -> Outcome {
        Outcome { n, sandbox: None, result: None, error: Some("error: no memory".into()) }
    }

    #[test]
    fn the_speed_up_is_the_sum_over_the_whole() {
        let results = vec![ran(1, 0, 300, "", ""), ran(2, 0, 500, "", "")];
        let tally = Tally::new(results, 10.0, 500.0);
        assert_eq!((tally.sequential_ms, tally.parallel_ms), (800.0, 500.0));
        assert!((tally.speed_up - 1.6).abs() < 1e-9, "{tally:?}");
        assert!((tally.efficiency - 0.8).abs() < 1e-9, "{tally:?}");
        assert_eq!(tally.failed, 0);
    }

    #[test]
    fn what_did_not_run_fails_and_does_not_count_as_fast() {
        let tally = Tally::new(vec![ran(1, 0, 400, "", ""), missing(2)], 1.0, 400.0);
        assert_eq!((tally.failed, tally.speed_up, tally.efficiency), (1, 1.0, 1.0));
    }

    #[test]
    fn nothing_at_all_is_no_division_by_zero() {
        let tally = Tally::new(vec![missing(1)], 0.0, 0.0);
        assert_eq!((tally.speed_up, tally.efficiency, tally.failed), (0.0, 0.0, 1));
    }

    #[test]
    fn a_result_is_its_first_line() {
        let results = vec![
            ran(1, 0, 1200, "\n42 files\x1b[2J\nmore\n", ""),
            ran(2, 3, 20, "", "no such file\n"),
            missing(3),
        ];
        let text = Tally::new(results, 212.0, 1220.0).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "N   SANDBOX   EXIT   TIME    OUTPUT");
        assert_eq!(lines[1], "1   a-1       0      1.2 s   42 files\\u{1b}[2J");
        assert_eq!(lines[2], "2   a-2       3      20 ms   no such file");
        assert_eq!(lines[3], "3   -         -      -       error: no memory");
        assert_eq!(lines[5], "succeeded:  1 of 3");
        assert!(text.contains("one by one: 1.2 s (sum of the times)\n"), "{text}");
    }
}
