//! Invocations on the real engine: what was acknowledged is run and told, whatever is killed when.

use serde_json::{Value, json};
use torpor_e2e::{World, wait_for};
use torpor_lifecycle::fault::INVOCATION_POINTS;

use crate::webhooks::Receiver;

/// Answers with the id of the invocation and what it got; `/hold` after a while.
const PROGRAM: &str = r#"
import http.server, os, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        got = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/hold":
            time.sleep(3)
        body = self.headers["x-torpor-invocation"].encode() + b" " + got
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"#;
const INVOCATIONS: &str = "/v1/services/shop/invocations";

struct Shop {
    world: World,
    receiver: Receiver,
}

impl Shop {
    fn open() -> Self {
        let world = World::with_env(&[("TORPOR_EGRESS_OUTGOING", r#"["127.0.0.0/8"]"#)]);
        let dir = world.path("program");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("main.py"), PROGRAM).unwrap();
        world.torpor(&["service", "deploy", dir.to_str().unwrap(), "--name", "shop"]).ok();
        Self { world, receiver: Receiver::start() }
    }

    /// Asks for it, to be told when it is over. The answer may be cut off, as the daemon is.
    fn invoke(&self, path: &str, body: &str) {
        let secret = format!("whsec_{}", "A".repeat(44));
        let args = ["service", "invoke", "shop", path, "--data", body];
        let more = ["--callback", &self.receiver.url];
        let mut command = self.world.command(&[args.as_slice(), &more].concat());
        let _ = command.env("TORPOR_CALLBACK_SECRET", secret).output().unwrap();
    }

    /// The newest one.
    fn newest(&self) -> Value {
        self.world.get(INVOCATIONS).json()["invocations"][0].clone()
    }

    /// What the receiver was told of it, which succeeded with this body.
    fn is_told(&self, id: &str, body: &str) {
        wait_for("the callback", || {
            (self.receiver.types_of(id) == ["invocation.finished"]).then_some(())
        });
        let told = self.receiver.told.lock();
        let event = told.values().find(|event| event["subject"] == id).unwrap();
        let invocation = &event["data"]["invocation"];
        assert_eq!(invocation["state"], "succeeded", "{invocation}");
        assert_eq!(invocation["answer"]["body"], format!("{id} {body}"));
        let found = self.world.get(&format!("{INVOCATIONS}/{id}")).json();
        assert_eq!(&found, invocation);
    }
}

#[test]
fn an_invocation_is_run_again_and_told_although_the_daemon_is_killed_while_it_runs() {
    let mut shop = Shop::open();
    shop.invoke("/hold", "one");
    wait_for("it runs", || (shop.newest()["state"] == "running").then_some(()));
    shop.world.kill_daemon();
    shop.world.start_daemon();
    let id = shop.newest()["id"].as_str().unwrap().to_owned();
    shop.is_told(&id, "one");
    assert_eq!(shop.receiver.told.lock().len(), 1, "once");
}

#[test]
fn an_invocation_is_run_and_told_at_whatever_step_the_daemon_is_killed() {
    let mut shop = Shop::open();
    for place in INVOCATION_POINTS {
        shop.world.kill_daemon();
        shop.world.start_daemon_that_dies_at(place);
        shop.invoke("/", place);
        shop.world.daemon_dies();
        shop.world.start_daemon();
        let newest = shop.newest();
        let id = newest["id"].as_str().unwrap().to_owned();
        shop.is_told(&id, place);
    }
    let list = shop.world.get(INVOCATIONS).json();
    let states: Vec<_> =
        list["invocations"].as_array().unwrap().iter().map(|it| &it["state"]).collect();
    assert_eq!(states, vec![&json!("succeeded"); INVOCATION_POINTS.len()]);
}
