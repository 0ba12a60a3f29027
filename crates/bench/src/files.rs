//! A large file up and down, as a stream.

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use tokio::time::Instant;
use torpor_client::{Client, Route, body};
use torpor_protocol::api::FileEntry;

use crate::Bench;
use crate::error::{Error, Result};
use crate::load::Summary;
use crate::report::{Report, Start};

const SIZE: usize = 100_000_000;
/// Transfers each way.
const ROUNDS: usize = 5;

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let status = bench.create(client).await?;
    let route = Route::sandbox(&status.id).then("/files/content").query("path", "/tmp/bench");
    // Not zeros: nobody may be clever about them.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()
    });
    let bytes: Bytes = bytes.take(SIZE / 8).flatten().collect::<Vec<u8>>().into();
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        let body = body::full(bytes.clone());
        let _: FileEntry = client.upload(Method::PUT, &route, body).await?;
        up.push(begun.elapsed());
        let begun = Instant::now();
        let received = receive(client, &route).await?;
        down.push(begun.elapsed());
        if received != bytes.len() {
            return Err(Error::failed(format!("{received} of {} bytes came back", bytes.len())));
        }
    }
    for (name, times) in [("upload 100 MB", up), ("download 100 MB", down)] {
        let summary = Summary::of(&times);
        // 100 MB in so many milliseconds.
        report.at_least(&format!("{name}, p50"), 100_000.0 / summary.p50, 300.0, "MB/s");
        report.latency(name, Start::Running, summary);
    }
    Ok(client.delete(&Route::sandbox(&status.id)).await?)
}

async fn receive(client: &Client, route: &Route) -> Result<usize> {
    let mut body = client.send(Method::GET, route, body::empty()).await?.into_body();
    let mut received = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Error::garbled("the download broke off", error))?;
        received += frame.data_ref().map_or(0, Bytes::len);
    }
    Ok(received)
}
