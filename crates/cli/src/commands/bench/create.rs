//! From the request for a sandbox to the first command's output, and where that time goes.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::api::{Command, RunResult};

use super::Bench;
use super::load::Summary;
use super::report::Report;
use crate::client::{Client, Route};
use crate::error::{Error, Result};

pub(super) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let mut whole = Vec::new();
    let mut creates = Vec::new();
    let mut deletes = Vec::new();
    let mut steps: BTreeMap<String, Vec<Duration>> = BTreeMap::new();
    let mut order = Vec::new();
    for _ in 0..bench.rounds {
        let begun = Instant::now();
        let status = bench.create(client).await?;
        creates.push(begun.elapsed());
        let route = Route::sandbox(&status.id);
        let hello = Command { command: vec!["echo".into(), "hello".into()], ..Command::default() };
        let result: RunResult = client.post(&route.clone().then("/run"), &hello).await?;
        whole.push(begun.elapsed());
        if result.stdout != "hello\n" {
            return Err(Error::failed(format!("the first command said {:?}", result.stdout)));
        }
        for step in status.start_steps {
            if !steps.contains_key(&step.name) {
                order.push(step.name.clone());
            }
            steps.entry(step.name).or_default().push(Duration::from_secs_f64(step.ms / 1e3));
        }
        let begun = Instant::now();
        client.delete(&route).await?;
        deletes.push(begun.elapsed());
    }
    report.latency("create → first output", Summary::of(&whole));
    report.latency("create", Summary::of(&creates));
    for name in order {
        report.latency(format!("  {name}"), Summary::of(&steps[&name]));
    }
    report.latency("delete", Summary::of(&deletes));
    Ok(())
}
