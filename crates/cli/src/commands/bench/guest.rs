//! A sandbox to be measured: a Python process in it holds a counter and so much memory.

use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;
use tokio::time::Instant;
use torpor_protocol::api::{Command, CreateSandbox, Process};
use torpor_protocol::snapshot::{Sleep, TakeSnapshot};
use torpor_protocol::{SandboxId, Snapshot, State, Status, Tier};

use super::Bench;
use crate::client::{Client, Route, body};
use crate::error::{Error, Result};

/// What is read to hear from the agent. The program writes it when it holds its memory.
pub(super) const FILE: &str = "/tmp/torpor-bench";
/// Fills as many MB as it is told, says so, and counts.
pub(super) const PROGRAM: &str = "import sys, time
held = [bytes([n % 255 + 1]) * 1000000 for n in range(int(sys.argv[1]))]
with open('/tmp/torpor-bench', 'w') as file:
    file.write('ready')
count = 0
while True:
    count += 1
    time.sleep(0.1)";
/// Longer than Python needs to start and to fill a gigabyte on a busy machine.
const READY_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);
/// What a sandbox has beside the memory that its program holds.
const ROOM_MIB: u64 = 512;

/// Command line of the program with so much memory.
pub(super) fn command(megabytes: u64) -> Vec<String> {
    ["python3", "-c", PROGRAM, &megabytes.to_string()].map(str::to_owned).to_vec()
}

/// For people: `small` or `100 MB`.
pub(super) fn size(megabytes: u64) -> String {
    match megabytes {
        0 => "small".to_owned(),
        megabytes => format!("{megabytes} MB"),
    }
}

#[derive(Debug, Clone)]
pub(super) struct Guest {
    pub(super) id: SandboxId,
}

impl Guest {
    /// Creates one and waits until its program holds its memory.
    pub(super) async fn start(bench: &Bench, client: &Client, megabytes: u64) -> Result<Self> {
        let memory_mib = (megabytes > 100).then_some(megabytes + ROOM_MIB);
        let wish = CreateSandbox { memory_mib, ..bench.sandbox() };
        let status: Status = client.post(&Route::new("/v1/sandboxes"), &wish).await?;
        let guest = Self { id: status.id };
        let command = Command { command: command(megabytes), ..Command::default() };
        let _: Process = client.post(&guest.route().then("/processes"), &command).await?;
        let deadline = Instant::now() + READY_MAX;
        while guest.ask(client).await.is_err() {
            if Instant::now() > deadline {
                return Err(Error::failed(format!("Python was not ready within {READY_MAX:?}")));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(guest)
    }

    pub(super) fn route(&self) -> Route {
        Route::sandbox(&self.id)
    }

    /// The smallest thing that needs the agent: reads a small file.
    pub(super) async fn ask(&self, client: &Client) -> Result<()> {
        let route = self.route().then("/files/content").query("path", FILE);
        let mut body = client.send(Method::GET, &route, body::empty()).await?.into_body();
        let mut said = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Error::garbled("the answer broke off", error))?;
            said.extend(frame.into_data().unwrap_or_default());
        }
        if said == b"ready" {
            return Ok(());
        }
        Err(Error::failed(format!("the file in the sandbox says {said:?}")))
    }

    /// Waits until a server inside listens.
    pub(super) async fn listens(&self, client: &Client, port: u16) -> Result<()> {
        let route = self.route().then("/tunnel").part(&port.to_string());
        let deadline = Instant::now() + READY_MAX;
        while let Err(error) = client.socket(&route).await {
            if Instant::now() > deadline {
                return Err(error);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    pub(super) async fn status(&self, client: &Client) -> Result<Status> {
        client.get(&self.route()).await
    }

    /// Puts it to sleep and makes sure that it sleeps as it should: on disk, and in memory or not.
    pub(super) async fn sleep(&self, client: &Client, tier: Tier) -> Result<()> {
        let wish = Sleep { cold: tier == Tier::Cold };
        let _: Status = client.post(&self.route().then("/sleep"), &wish).await?;
        // The answer may tell the moment before.
        let status = self.wait(client, State::Asleep).await?;
        if status.tier == Some(tier) && status.durable {
            return Ok(());
        }
        let Status { tier, durable, message, .. } = status;
        Err(Error::failed(format!(
            "it sleeps as {tier:?}, durable {durable}, because of {message:?}"
        )))
    }

    /// Waits until its status says so.
    pub(super) async fn wait(&self, client: &Client, state: State) -> Result<Status> {
        let deadline = Instant::now() + READY_MAX;
        let mut status = self.status(client).await?;
        while status.state != state {
            if Instant::now() > deadline {
                return Err(Error::failed(format!("it is {} for ever", status.state.as_str())));
            }
            let after = status.generation.to_string();
            let route = self.route().then("/status").query("after", &after);
            status = client.get(&route.query("wait_ms", "5000")).await?;
        }
        Ok(status)
    }

    pub(super) async fn snapshot(&self, bench: &Bench, client: &Client) -> Result<Snapshot> {
        let request = TakeSnapshot { name: Some(bench.fresh_name()), ..TakeSnapshot::default() };
        client.post(&self.route().then("/snapshots"), &request).await
    }

    pub(super) async fn delete(&self, client: &Client) -> Result<()> {
        client.delete(&self.route()).await
    }
}
