//! The first request after each of many wakes, from memory and from disk in turn: how many fail.
//!
//! A server inside counts its requests, so that one that is lost, answered twice or answered by a machine
//! that forgot something is noticed.

use std::time::Duration;

use futures_util::future::try_join_all;
use futures_util::{SinkExt, StreamExt};
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;
use torpor_client::Client;
use torpor_protocol::Tier;
use torpor_protocol::api::{Command, Process};

use crate::cost::count;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::load::Summary;
use crate::report::{Report, Start};
use crate::{Bench, clean_up, run};

/// Sandboxes that sleep and wake beside each other.
const GUESTS: usize = 4;
const PORT: u16 = 3000;
/// Holds 20 MB and tells how often it was asked. It closes each connection first, as many servers do.
const SERVER: &str = "import http.server
held = [bytes([n % 255 + 1]) * 1000000 for n in range(20)]
class Counter(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Counter.asked += 1
        said = b'%d %d' % (Counter.asked, sum(map(len, held)))
        self.send_response(200)
        self.send_header('content-length', str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *_):
        pass
http.server.HTTPServer(('127.0.0.1', 3000), Counter).serve_forever()";

/// What a sandbox is asked first after a wake.
#[derive(Debug, Clone, Copy)]
enum First {
    Preview,
    Tunnel,
    Run,
    File,
}

impl First {
    const ALL: [Self; 4] = [Self::Preview, Self::Tunnel, Self::Run, Self::File];
}

/// One wake, and what became of the request that caused it.
struct Wake {
    tier: Tier,
    latency: Duration,
    error: Option<String>,
}

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let lives = (0..GUESTS).map(|_| Life::start(bench, client));
    let mut lives = try_join_all(lives).await?;
    let lived = lives.iter_mut().map(|life| life.wakes(client, bench.rounds));
    let wakes: Vec<Wake> = try_join_all(lived).await?.into_iter().flatten().collect();
    let failed: Vec<_> = wakes.iter().filter_map(|wake| wake.error.as_ref()).collect();
    report.figure("wakes", count(wakes.len()), "");
    report.figure("  of them failed", count(failed.len()), "");
    for error in &failed {
        report.note(format!("failed: {error}"));
    }
    for (tier, start) in [(Tier::Warm, Start::Warm), (Tier::Cold, Start::Cold)] {
        let times: Vec<_> =
            wakes.iter().filter(|wake| wake.tier == tier).map(|wake| wake.latency).collect();
        report.latency("first request after a wake", start, Summary::of(&times));
    }
    clean_up(client).await
}

/// A sandbox with a server in it, and how often that was asked.
struct Life {
    guest: Guest,
    asked: u64,
}

impl Life {
    async fn start(bench: &Bench, client: &Client) -> Result<Self> {
        let guest = Guest::start(bench, client, 0).await?;
        let command = ["python3", "-c", SERVER].map(str::to_owned).to_vec();
        let command = Command { command, ..Command::default() };
        let _: Process = client.post(&guest.route().then("/processes"), &command).await?;
        guest.listens(PORT).await?;
        let mut life = Self { guest, asked: 0 };
        let said = life.preview(client).await?;
        life.asked = requests(&said)?;
        Ok(life)
    }

    async fn wakes(&mut self, client: &Client, rounds: u32) -> Result<Vec<Wake>> {
        let mut wakes = Vec::new();
        for round in 0..rounds as usize {
            let tier = if round % 2 == 0 { Tier::Warm } else { Tier::Cold };
            let first = First::ALL[round / 2 % First::ALL.len()];
            self.guest.sleep(tier).await?;
            let begun = Instant::now();
            let asked = self.ask(client, first).await;
            let tell =
                |error: Error| format!("wake {round}, {}, {first:?}: {error}", tier.as_str());
            wakes.push(Wake { tier, latency: begun.elapsed(), error: asked.err().map(tell) });
        }
        Ok(wakes)
    }

    async fn ask(&mut self, client: &Client, first: First) -> Result<()> {
        let said = match first {
            First::Preview => self.preview(client).await?,
            First::Tunnel => self.tunnel(client).await?,
            First::Run => return run::api(client, &self.guest.route().then("/run")).await,
            First::File => return self.guest.ask().await,
        };
        let (before, now) = (self.asked, requests(&said)?);
        self.asked = now;
        if now == before + 1 && said.ends_with(" 20000000") {
            return Ok(());
        }
        Err(Error::failed(format!("the server says {said:?} after {before} requests")))
    }

    async fn preview(&self, client: &Client) -> Result<String> {
        let said = client.preview(&format!("{PORT}-{}", self.guest.id)).await?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    async fn tunnel(&self, client: &Client) -> Result<String> {
        let route = self.guest.route().then("/tunnel").part(&PORT.to_string());
        let mut socket = client.socket(&route).await?;
        let broken = |error| Error::garbled("the tunnel broke off", error);
        socket.send(Message::binary("GET / HTTP/1.0\r\n\r\n")).await.map_err(broken)?;
        let mut said = Vec::new();
        while let Some(message) = socket.next().await {
            match message.map_err(broken)? {
                Message::Binary(bytes) => said.extend(bytes),
                Message::Close(_) => break,
                Message::Text(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
        let said = String::from_utf8_lossy(&said).into_owned();
        Ok(said.rsplit("\r\n").next().unwrap_or_default().to_owned())
    }
}

/// How often the server was asked, by its own count.
fn requests(said: &str) -> Result<u64> {
    let count = said.split(' ').next().and_then(|count| count.parse().ok());
    count.ok_or_else(|| Error::failed(format!("the server says {said:?}")))
}
