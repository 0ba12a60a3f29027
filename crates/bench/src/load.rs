//! Requests on a schedule, and what their latencies were.
//!
//! The schedule is fixed before the first request: whoever is slow can't slow the load down, and a
//! latency counts from the moment its request was due.

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
pub(crate) struct Summary {
    pub(crate) count: u64,
    pub(crate) min: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Summary {
    pub(crate) fn of(times: &[Duration]) -> Self {
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

/// How long a job takes.
pub(crate) async fn timed(job: impl Future<Output = Result<()>>) -> Result<Duration> {
    let begun = Instant::now();
    job.await?;
    Ok(begun.elapsed())
}

/// What became of a job on a schedule.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// When it was due, from the beginning.
    pub(crate) due: Duration,
    /// From then until it was done.
    pub(crate) latency: Duration,
    pub(crate) error: Option<Error>,
}

/// Starts a job at each of these times after now, whether or not the earlier ones are done.
pub(crate) async fn at_times<F>(
    times: &[Duration],
    job: impl Fn(usize) -> F,
) -> Result<Vec<Outcome>>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let begun = Instant::now();
    let mut jobs = JoinSet::new();
    for (number, due) in times.iter().copied().enumerate() {
        let moment = begun + due;
        if moment > Instant::now() {
            tokio::time::sleep_until(moment).await;
        }
        let job = job(number);
        jobs.spawn(async move {
            let error = job.await.err();
            Outcome { due, latency: moment.elapsed(), error }
        });
    }
    let mut outcomes = Vec::with_capacity(jobs.len());
    while let Some(done) = jobs.join_next().await {
        outcomes.push(done.map_err(|error| Error::failed(format!("a request panicked: {error}")))?);
    }
    outcomes.sort_by_key(|outcome| outcome.due);
    Ok(outcomes)
}

/// Starts `count` jobs at `rate` a second.
pub(crate) async fn on_schedule<F>(
    rate: f64,
    count: u32,
    job: impl Fn(usize) -> F,
) -> Result<Vec<Duration>>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let due = |number| Duration::from_secs_f64(f64::from(number) / rate);
    all_well(at_times(&(0..count).map(due).collect::<Vec<_>>(), job).await?)
}

/// Starts jobs of two kinds in turn, `count` of each, at `rate` a second together: what the machine does
/// meanwhile meets both.
pub(crate) async fn in_turn<F>(
    rate: f64,
    count: u32,
    job: impl Fn(bool) -> F,
) -> Result<(Summary, Summary)>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let second = |number: usize| number % 2 == 1;
    let times = on_schedule(rate, count.saturating_mul(2), |number| job(second(number))).await?;
    let of = |which: bool| {
        let times = times.iter().enumerate().filter(|(number, _)| second(*number) == which);
        Summary::of(&times.map(|(_, time)| *time).collect::<Vec<_>>())
    };
    Ok((of(false), of(true)))
}

/// Starts `count` jobs at one instant.
pub(crate) async fn at_once<F>(count: usize, job: impl Fn(usize) -> F) -> Result<Vec<Duration>>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    all_well(at_times(&vec![Duration::ZERO; count], job).await?)
}

fn all_well(outcomes: Vec<Outcome>) -> Result<Vec<Duration>> {
    let time = |outcome: Outcome| match outcome.error {
        Some(error) => Err(error),
        None => Ok(outcome.latency),
    };
    outcomes.into_iter().map(time).collect()
}

/// Arrivals of a Poisson process of which it is known that `count` come within `span`: independent
/// and uniform. Always the same ones, so that runs can be compared.
pub(crate) fn poisson(count: usize, span: Duration) -> Vec<Duration> {
    let mut random = SplitMix::default();
    let uniform = || span.mul_f64(random.share());
    let mut times: Vec<_> = std::iter::repeat_with(uniform).take(count).collect();
    times.sort();
    times
}

/// SplitMix64: numbers that look random, always the same ones.
#[derive(Debug)]
pub(crate) struct SplitMix(u64);

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Default for SplitMix {
    fn default() -> Self {
        Self(GOLDEN)
    }
}

impl SplitMix {
    pub(crate) fn draw(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(GOLDEN);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((z ^ (z >> 31)) >> 32).expect("32 bits are left")
    }

    /// From 0 to 1.
    pub(crate) fn share(&mut self) -> f64 {
        f64::from(self.draw()) / f64::from(u32::MAX)
    }
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

    #[test]
    fn arrivals_are_spread_over_the_span_in_order() {
        let span = Duration::from_secs(10);
        let times = poisson(1000, span);
        assert!(times.is_sorted() && times.iter().all(|time| *time <= span));
        for second in 0..10 {
            let within = |time: &&Duration| time.as_secs() == second;
            let count = times.iter().filter(within).count();
            assert!((50..150).contains(&count), "{count} in second {second}");
        }
        // A schedule at equal distances would have no two arrivals this close.
        let close = times.windows(2).filter(|pair| pair[1] - pair[0] < span / 5000).count();
        assert!(close > 50, "{close}");
    }
}
