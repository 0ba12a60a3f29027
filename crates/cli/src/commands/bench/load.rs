//! Requests on a schedule, and what their latencies were.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::error::{Error, Result};

/// What takes longer than an hour is counted as an hour.
const HOUR_MICROS: u64 = 3_600_000_000;

/// Latencies of one kind, in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Summary {
    pub(super) count: u64,
    pub(super) min: f64,
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Summary {
    pub(super) fn of(times: &[Duration]) -> Self {
        // Microseconds with three digits: finer than the clock of a busy machine.
        let mut histogram = Histogram::<u64>::new(3).expect("three digits are allowed");
        for time in times {
            let micros = u64::try_from(time.as_micros()).unwrap_or(HOUR_MICROS).min(HOUR_MICROS);
            histogram.record(micros).expect("it grows to what it is given");
        }
        let at = |quantile| ms(histogram.value_at_quantile(quantile));
        Self {
            count: histogram.len(),
            min: ms(histogram.min()),
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            max: ms(histogram.max()),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds for people")]
fn ms(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

/// Starts `count` jobs at `rate` a second, whether or not the earlier ones are done. A latency counts
/// from the moment its job was due.
pub(super) async fn on_schedule<F>(
    rate: f64,
    count: u32,
    job: impl Fn(u32) -> F,
) -> Result<Vec<Duration>>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let begun = Instant::now();
    let mut jobs = JoinSet::new();
    for number in 0..count {
        let due = begun + Duration::from_secs_f64(f64::from(number) / rate);
        tokio::time::sleep_until(due).await;
        let job = job(number);
        jobs.spawn(async move { job.await.map(|()| due.elapsed()) });
    }
    collect(jobs).await
}

/// Starts `count` jobs at one instant.
pub(super) async fn at_once<F>(count: u32, job: impl Fn(u32) -> F) -> Result<Vec<Duration>>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let due = Instant::now();
    let mut jobs = JoinSet::new();
    for number in 0..count {
        let job = job(number);
        jobs.spawn(async move { job.await.map(|()| due.elapsed()) });
    }
    collect(jobs).await
}

async fn collect(mut jobs: JoinSet<Result<Duration>>) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(jobs.len());
    while let Some(done) = jobs.join_next().await {
        times.push(done.map_err(|error| Error::failed(format!("a request panicked: {error}")))??);
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_percentiles() {
        let times: Vec<_> = (1..=100).map(Duration::from_millis).collect();
        let summary = Summary::of(&times);
        assert_eq!(summary.count, 100);
        assert!((summary.p50 - 50.0).abs() < 0.5, "{summary:?}");
        assert!((summary.p99 - 99.0).abs() < 0.5, "{summary:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_shows_in_every_request_it_delayed() {
        // One server that serves one request at a time and takes two seconds for the first.
        let server = std::sync::Arc::new(tokio::sync::Mutex::new(Duration::from_secs(2)));
        let times = on_schedule(10.0, 10, |_| {
            let server = server.clone();
            async move {
                let mut time = server.lock().await;
                tokio::time::sleep(*time).await;
                *time = Duration::ZERO;
                Ok(())
            }
        });
        let late = times.await.unwrap().iter().filter(|time| time.as_millis() > 1000).count();
        assert_eq!(late, 10);
    }
}
