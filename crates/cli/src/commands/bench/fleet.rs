//! Many sandboxes asked for at one instant.

use tokio::time::Instant;

use super::load::{Summary, at_once};
use super::report::Report;
use super::{Bench, clean_up};
use crate::client::{Client, Route};
use crate::error::Result;

pub(super) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let begun = Instant::now();
    let times = at_once(bench.fleet, |_| {
        let (client, spec) = (client.clone(), bench.sandbox());
        async move {
            let created: Result<torpor_protocol::Status> =
                client.post(&Route::new("/v1/sandboxes"), &spec).await;
            created.map(drop)
        }
    });
    let summary = Summary::of(&times.await?);
    let name = format!("{} created at once", bench.fleet);
    report.figure(format!("{name}: all up after"), begun.elapsed().as_secs_f64(), "s");
    report.latency(name, summary);
    clean_up(client).await
}
