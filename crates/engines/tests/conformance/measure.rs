//! How long the steps of a boot take on this host:
//! `cargo test -p torpor-engines --release --test conformance -- --ignored --nocapture measure`.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;
use torpor_lifecycle::engine::Engine;
use tracing::field::{Field, Visit};
use tracing::span;

use crate::world::{greet, world};

const BOOTS: usize = 60;

type Samples = Arc<Mutex<BTreeMap<String, Vec<f64>>>>;

/// Collects the numbers that the engine logs.
struct Collector(Samples);

impl Visit for Collector {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.lock().entry(field.name().into()).or_default().push(value);
    }
    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

impl tracing::Subscriber for Collector {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("torpor_engines")
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut Collector(self.0.clone()));
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn the_steps_of_a_boot() {
    let Some(world) = world().await else { return };
    let samples = Samples::default();
    // Boots run on other threads than this one.
    tracing::subscriber::set_global_default(Collector(samples.clone())).unwrap();
    let note = |name: &str, since: Instant| {
        let millis = since.elapsed().as_secs_f64() * 1e3;
        samples.lock().entry(name.into()).or_default().push(millis);
    };
    for _ in 0..BOOTS {
        let begun = Instant::now();
        let mut machine = world.engine().boot(world.plan()).await.unwrap();
        note("boot (all steps)", begun);
        let guest = greet(machine.channel()).await;
        note("boot to hello", begun);
        let begun = Instant::now();
        guest.health().await.unwrap();
        note("round trip", begun);
        let begun = Instant::now();
        machine.pause().await.unwrap();
        note("pause", begun);
        let begun = Instant::now();
        machine.resume().await.unwrap();
        guest.health().await.unwrap();
        note("resume to answer", begun);
        let begun = Instant::now();
        machine.kill().await.unwrap();
        note("kill", begun);
    }
    for (name, values) in &mut *samples.lock() {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() - 1) as f64 * share) as usize];
        println!("{name:>18}: min {:7.2}  p50 {:7.2}  p95 {:7.2} ms", at(0.), at(0.5), at(0.95));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn fifty_boots_at_once() {
    let Some(world) = world().await else { return };
    let begun = Instant::now();
    let mut boots = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let (engine, plan) = (world.engine().clone(), world.plan());
        boots.spawn(async move {
            let machine = engine.boot(plan).await.unwrap();
            greet(machine.channel()).await;
            (begun.elapsed(), machine)
        });
    }
    let mut booted = boots.join_all().await;
    booted.sort_by_key(|(after, _)| *after);
    println!("50 boots at once: p50 {:?}, all {:?}", booted[25].0, booted[49].0);
    let begun = Instant::now();
    for (_, machine) in booted {
        machine.kill().await.unwrap();
    }
    println!("50 kills in a row: {:?}", begun.elapsed());
}
