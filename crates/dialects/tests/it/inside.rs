//! `/api/v1`: what is inside a sandbox, in the bytes that Tensorlake's clients send and expect.

mod files;
mod processes;
mod pty;
mod routing;
mod run;
mod tunnel;
mod wire;

use serde_json::{Value, json};

use crate::client::{Answer, Ask};
use crate::world::World;
use wire::{Events, Socket};

/// A world with a sandbox called `web`.
struct Place {
    world: World,
}

impl Place {
    async fn new() -> Self {
        let world = World::new().await;
        world.named("web").await;
        Self { world }
    }

    fn ask(&self, method: &'static str, path: &str) -> Ask {
        Ask::new(method, format!("/api/v1{path}")).host("web.local")
    }

    async fn send(&self, ask: Ask) -> Answer {
        self.world.send(ask).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(self.ask("GET", path)).await
    }

    async fn delete(&self, path: &str) -> Answer {
        self.send(self.ask("DELETE", path)).await
    }

    async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.ask("POST", path).json(body)).await
    }

    /// Posts bytes, or nothing.
    async fn tell(&self, path: &str, bytes: &str) -> Answer {
        self.send(self.ask("POST", path).raw(bytes)).await
    }

    async fn run(&self, body: &Value) -> Events {
        let ask = self.ask("POST", "/processes/run").json(body);
        Events::new(ask.open(self.world.address).await)
    }

    /// Starts a shell command in the background and gives its process id.
    async fn start(&self, script: &str) -> u64 {
        let body = json!({"command": "sh", "args": ["-c", script]});
        self.post("/processes", &body).await.expect(201)["pid"].as_u64().unwrap()
    }

    async fn follow(&self, pid: u64, stream: &str) -> Events {
        let ask = self.ask("GET", &format!("/processes/{pid}/{stream}/follow"));
        Events::new(ask.open(self.world.address).await)
    }

    async fn socket(&self, path: &str) -> Socket {
        self.try_socket(path, &[]).await.unwrap_or_else(|refused| panic!("{refused:?}"))
    }

    async fn try_socket(
        &self,
        path: &str,
        headers: &[(&'static str, &str)],
    ) -> Result<Socket, (u16, Value)> {
        let path = format!("/api/v1{path}");
        Socket::open(self.world.address, "web.local", &path, headers).await
    }

    async fn suspend(&self) {
        self.world.suspend("web").await;
    }

    async fn resume(&self) {
        self.world.tell("/sandboxes/web/resume?wait_ms=30000").await.expect(200);
    }

    /// Waits until a process is so.
    async fn wait(&self, process: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let path = format!("/processes/{process}");
        let look = async || Some(self.get(&path).await.expect(200)).filter(&holds);
        self.world.until(&path, look).await
    }

    /// A shell command that goes on for as long as the test does.
    fn stay(&self) -> String {
        format!("while [ -e {} ]; do sleep 0.05; done", self.path(""))
    }

    fn path(&self, name: &str) -> String {
        self.world.dir.join(name).to_str().unwrap().to_owned()
    }
}

/// A path as it stands in a query, with `+` for a space.
fn form(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => {
                char::from(byte).to_string()
            }
            b' ' => "+".to_owned(),
            byte => format!("%{byte:02X}"),
        })
        .collect()
}
