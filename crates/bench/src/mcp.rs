//! A command through a sandbox's MCP server, beside the same command through the API.

use serde_json::{Value, json};
use torpor_client::{Client, Route};
use torpor_protocol::api::{Command, RunResult};

use crate::Bench;
use crate::error::{Error, Result};
use crate::load::{Summary, in_turn, timed};
use crate::report::{Report, Start};

/// Calls before the first one that counts: connections, page cache.
const WARM_UP: u32 = 5;
/// How often each is done: a percentile of few says nothing.
const TIMES: u32 = 10;

/// Alternately, so that what others do on the machine meets both.
pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let status = bench.create(client).await?;
    let sandbox = Route::sandbox(&status.id);
    let (direct, mcp) = (sandbox.clone().then("/run"), sandbox.clone().then("/mcp"));
    for _ in 0..WARM_UP {
        run(client, &direct).await?;
        ask(client, &mcp, "run", json!({"command": "true"})).await?;
    }
    let (mut runs, mut calls, mut looks) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..bench.rounds.saturating_mul(TIMES) {
        runs.push(timed(run(client, &direct)).await?);
        calls.push(timed(ask(client, &mcp, "run", json!({"command": "true"}))).await?);
        looks.push(timed(ask(client, &mcp, "status", json!({}))).await?);
    }
    let (runs, calls) = (Summary::of(&runs), Summary::of(&calls));
    report.figure("MCP − direct, p50", calls.p50 - runs.p50, "ms");
    report.figure("MCP / direct, p50", calls.p50 / runs.p50, "×");
    report.figure("MCP − direct, p99", calls.p99 - runs.p99, "ms");
    report.latency("POST …/run of sh -c true, alternately", Start::Running, runs);
    report.latency("MCP run of true, alternately", Start::Running, calls);
    report.latency("MCP status, alternately", Start::Running, Summary::of(&looks));
    let (runs, calls) = in_turn(bench.rate, bench.rounds.saturating_mul(TIMES), |through_mcp| {
        let (client, direct, mcp) = (client.clone(), direct.clone(), mcp.clone());
        async move {
            match through_mcp {
                true => ask(&client, &mcp, "run", json!({"command": "true"})).await,
                false => run(&client, &direct).await,
            }
        }
    })
    .await?;
    let rate = bench.rate;
    report.latency(format!("POST …/run, in turn, {rate} a second of both"), Start::Running, runs);
    report.latency(format!("MCP run, in turn, {rate} a second of both"), Start::Running, calls);
    Ok(client.delete(&sandbox).await?)
}

/// What the tool does, without MCP.
async fn run(client: &Client, route: &Route) -> Result<()> {
    let command = ["/bin/sh", "-c", "true"].map(str::to_owned).to_vec();
    let result: RunResult = client.post(route, &Command { command, ..Command::default() }).await?;
    if result.exit.exit_code == Some(0) {
        return Ok(());
    }
    Err(Error::failed(format!("true ended with {:?}", result.exit)))
}

async fn ask(client: &Client, route: &Route, tool: &str, arguments: Value) -> Result<()> {
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": tool, "arguments": arguments, "_meta": {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {}}}});
    let answer = client.mcp(route, &message, None).await?.next().await?.unwrap_or_default();
    let result = &answer["result"];
    let failed = result["structuredContent"]["exit_code"].as_i64().is_some_and(|code| code != 0);
    if result["isError"] == false && !failed {
        return Ok(());
    }
    Err(Error::failed(format!("MCP answered {answer}")))
}
