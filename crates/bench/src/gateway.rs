//! What the MCP gateway adds: the same call of the same server, directly and through it, in turns.
//!
//! The server is a program of the benchmark on loopback, so this needs the daemon's own host, and a daemon whose
//! operator opened loopback (`TORPOR_EGRESS_OUTGOING='["127.0.0.1/32"]'`).

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use torpor_client::{Client, Route, Server};
use torpor_protocol::mcp_gateway::{AddMcpServer, McpHttpServer, McpServer, McpServerSpec};

use crate::Bench;
use crate::error::{Error, Result};
use crate::load::{Summary, in_turn};
use crate::report::{Report, Start};

/// Calls of one turn, and for each round asked for.
const CALLS: u32 = 20;
/// Calls a second, directly and through the gateway together, in the part with a schedule.
const RATE: f64 = 400.0;
/// Tools that the server has: each call is compared with a list of so many.
const TOOLS: usize = 60;
const BODY_MAX: usize = 1 << 20;

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let listener =
        TcpListener::bind("127.0.0.1:0").await.map_err(|error| Error::local("listen", error))?;
    let address = listener.local_addr().map_err(|error| Error::local("listen", error))?;
    let server = tokio::spawn(serve(listener));
    let name = bench.fresh_name();
    let spec = McpServerSpec::Http(McpHttpServer {
        url: format!("http://{address}/mcp"),
        ..McpHttpServer::default()
    });
    let request = AddMcpServer { name: name.clone(), spec, approve: true, replace: false };
    let added: McpServer = client.post(&Route::new("/v1/mcp/gateway/servers"), &request).await?;
    let measured = match added.problem {
        Some(problem) => {
            Err(Error::failed(format!("the gateway does not reach the server: {problem}")))
        }
        None => {
            compare(bench, client, &name.to_string(), &format!("http://{address}"), report).await
        }
    };
    let removed = client.delete(&Route::new("/v1/mcp/gateway/servers").part(name.as_str())).await;
    server.abort();
    measured.and(removed.map_err(Error::from))
}

async fn compare(
    bench: &Bench,
    client: &Client,
    name: &str,
    url: &str,
    report: &mut Report,
) -> Result<()> {
    let upstream: Server = url.parse().map_err(|why: String| Error::failed(why))?;
    let direct = Client::new(upstream, None)?;
    let gateway_tool = format!("{name}_echo");
    let (mut one, mut other) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        for _ in 0..CALLS {
            let begun = Instant::now();
            call(&direct, "/mcp", "echo").await?;
            one.push(begun.elapsed());
        }
        for _ in 0..CALLS {
            let begun = Instant::now();
            call(client, "/v1/mcp/gateway", &gateway_tool).await?;
            other.push(begun.elapsed());
        }
    }
    let (one, other) = (Summary::of(&one), Summary::of(&other));
    report.figure("MCP gateway, added to a call, p50", other.p50 - one.p50, "ms");
    report.figure("MCP gateway, added to a call, p99", other.p99 - one.p99, "ms");
    report.latency("MCP call, directly", Start::Running, one);
    report.latency("MCP call, through the gateway", Start::Running, other);
    let (one, other) = in_turn(RATE, bench.rounds.saturating_mul(CALLS), |through_it| {
        let (client, direct, tool) = (client.clone(), direct.clone(), gateway_tool.clone());
        async move {
            match through_it {
                true => call(&client, "/v1/mcp/gateway", &tool).await,
                false => call(&direct, "/mcp", "echo").await,
            }
        }
    })
    .await?;
    report.latency(format!("MCP call, directly, {RATE} a second of both"), Start::Running, one);
    report.latency("MCP call, through the gateway, the same", Start::Running, other);
    Ok(())
}

async fn call(client: &Client, path: &str, tool: &str) -> Result<()> {
    let params = json!({ "name": tool, "arguments": { "text": "hello" } });
    let message = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params });
    let answer: Value = client.post(&Route::new(path), &message).await?;
    match answer["result"]["content"][0]["text"].as_str() {
        Some("hello") => Ok(()),
        Some(_) | None => Err(Error::failed(format!("a call was answered with {answer}"))),
    }
}

// === The server ===

async fn serve(listener: TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(converse(stream));
    }
}

/// HTTP/1.1, as much of it as two clients of ours need.
async fn converse(stream: TcpStream) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut stream = BufReader::new(stream);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await.ok()? == 0 {
                return None;
            }
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().ok().filter(|length| *length <= BODY_MAX)?;
            }
            if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        let body = answer(&serde_json::from_slice(&body).ok()?).to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.get_mut().write_all((head + &body).as_bytes()).await.ok()?;
    }
}

fn answer(message: &Value) -> Value {
    let tool = |name: String| {
        let schema = json!({"type": "object", "properties": {"text": {"type": "string", "description": "A text"}}});
        json!({"name": name, "description": "Says what it was told, and nothing else.", "inputSchema": schema})
    };
    let result = match message["method"].as_str().unwrap_or_default() {
        "server/discover" => json!({
            "resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}},
            "ttlMs": 300_000, "cacheScope": "private",
        }),
        "tools/list" => {
            let tools =
                (1..TOOLS).map(|n| tool(format!("tool{n}"))).chain([tool("echo".to_owned())]);
            json!({ "tools": tools.collect::<Vec<_>>(), "ttlMs": 300_000 })
        }
        _ => {
            json!({ "content": [{ "type": "text", "text": message["params"]["arguments"]["text"] }] })
        }
    };
    json!({ "jsonrpc": "2.0", "id": message["id"], "result": result })
}
