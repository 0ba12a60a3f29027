//! A sandbox to be measured: a Python process in it holds a counter and so much memory.

use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;
use tokio::time::Instant;
use torpor_client::{Client, Route, body};
use torpor_protocol::api::{Command, CreateSandbox, Process, Standby, UpdateSandbox};
use torpor_protocol::snapshot::{Sleep, TakeSnapshot};
use torpor_protocol::{SandboxId, Snapshot, State, Status, Tier};

use crate::Bench;
use crate::error::{Error, Result};

/// What is read to hear from the agent. The program writes it when it holds its memory.
pub(crate) const FILE: &str = "/tmp/torpor-bench";
/// Fills as many MB as it is told, says so, and counts.
pub(crate) const PROGRAM: &str = "import sys, time
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
pub(crate) fn command(megabytes: u64) -> Vec<String> {
    ["python3", "-c", PROGRAM, &megabytes.to_string()].map(str::to_owned).to_vec()
}

/// For people: `small` or `100 MB`.
pub(crate) fn size(megabytes: u64) -> String {
    match megabytes {
        0 => "small".to_owned(),
        megabytes => format!("{megabytes} MB"),
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Guest {
    pub(crate) client: Client,
    pub(crate) id: SandboxId,
}

impl Guest {
    /// Creates one and waits until its program holds its memory.
    pub(crate) async fn start(bench: &Bench, client: &Client, megabytes: u64) -> Result<Self> {
        let memory_mib = (megabytes > 100).then_some(megabytes + ROOM_MIB);
        let wish = CreateSandbox { memory_mib, ..bench.sandbox() };
        let status: Status = client.post(&Route::new("/v1/sandboxes"), &wish).await?;
        let guest = Self { client: client.clone(), id: status.id };
        let command = Command { command: command(megabytes), ..Command::default() };
        let _: Process = client.post(&guest.route().then("/processes"), &command).await?;
        let deadline = Instant::now() + READY_MAX;
        while guest.ask().await.is_err() {
            if Instant::now() > deadline {
                return Err(Error::failed(format!("Python was not ready within {READY_MAX:?}")));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(guest)
    }

    pub(crate) fn route(&self) -> Route {
        Route::sandbox(&self.id)
    }

    /// The smallest thing that needs the agent: reads a small file.
    pub(crate) async fn ask(&self) -> Result<()> {
        let route = self.route().then("/files/content").query("path", FILE);
        let mut body = self.client.send(Method::GET, &route, body::empty()).await?.into_body();
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
    pub(crate) async fn listens(&self, port: u16) -> Result<()> {
        let route = self.route().then("/tunnel").part(&port.to_string());
        let deadline = Instant::now() + READY_MAX;
        while let Err(error) = self.client.socket(&route).await {
            if Instant::now() > deadline {
                return Err(error.into());
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    pub(crate) async fn status(&self) -> Result<Status> {
        Ok(self.client.get(&self.route()).await?)
    }

    /// Puts it to sleep and makes sure that it sleeps as it should: on disk, and in memory or not.
    pub(crate) async fn sleep(&self, tier: Tier) -> Result<()> {
        let wish = Sleep { cold: tier == Tier::Cold };
        let _: Status = self.client.post(&self.route().then("/sleep"), &wish).await?;
        // The answer may tell the moment before.
        let status = self.wait(State::Asleep).await?;
        if status.tier == Some(tier) && status.durable {
            return Ok(());
        }
        let Status { tier, durable, message, .. } = status;
        Err(Error::failed(format!(
            "it sleeps as {tier:?}, durable {durable}, because of {message:?}"
        )))
    }

    /// Waits until its status says so.
    pub(crate) async fn wait(&self, state: State) -> Result<Status> {
        let deadline = Instant::now() + READY_MAX;
        let mut status = self.status().await?;
        while status.state != state {
            if Instant::now() > deadline {
                return Err(Error::failed(format!("it is {} for ever", status.state.as_str())));
            }
            let after = status.generation.to_string();
            let route = self.route().then("/status").query("after", &after);
            status = self.client.get(&route.query("wait_ms", "5000")).await?;
        }
        Ok(status)
    }

    pub(crate) async fn snapshot(&self, bench: &Bench) -> Result<Snapshot> {
        let request = TakeSnapshot { name: Some(bench.fresh_name()), ..TakeSnapshot::default() };
        Ok(self.client.post(&self.route().then("/snapshots"), &request).await?)
    }

    /// Has it sleep by itself like this.
    pub(crate) async fn update(&self, standby: Standby) -> Result<()> {
        let update = UpdateSandbox { standby: Some(standby), ..UpdateSandbox::default() };
        let _: Status = self.client.patch(&self.route(), &update).await?;
        Ok(())
    }

    pub(crate) async fn delete(&self) -> Result<()> {
        Ok(self.client.delete(&self.route()).await?)
    }
}
