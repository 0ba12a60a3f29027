//! `torpor bench`: shows what the benchmark says.

use std::process::ExitCode;

use torpor_bench::Bench;
use torpor_client::Client;

use crate::error::Result;
use crate::output;
use crate::progress::Progress;
use crate::signals::Signals;

pub(super) async fn run(bench: Bench, client: &Client) -> Result<ExitCode> {
    let mut signals = Signals::new()?;
    let stop = Box::pin(async move {
        signals.next().await;
        output::note("torpor: interrupted; cleaning up");
    });
    let progress = Progress::waiting("measuring");
    let say = Box::new(move |what: &str| progress.say(what.to_owned()));
    let (report, measured) = bench.run(client, say, stop).await?;
    output::print(&report.text(output::table))?;
    measured?;
    Ok(ExitCode::SUCCESS)
}
