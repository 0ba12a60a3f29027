//! Events reach whoever is to be told, whatever is killed when.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use serde_json::{Value, json};
use torpor_e2e::{World, wait_for};

/// Answers 204 to everything and remembers what came: bodies by `webhook-id`.
pub(crate) struct Receiver {
    pub(crate) url: String,
    pub(crate) told: Arc<Mutex<BTreeMap<String, Value>>>,
}

impl Receiver {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let told: Arc<Mutex<BTreeMap<_, _>>> = Arc::default();
        let kept = Arc::clone(&told);
        // Ends with the test's process.
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let kept = Arc::clone(&kept);
                thread::spawn(move || {
                    let mut reader = BufReader::new(stream);
                    while let Some((id, body)) = request(&mut reader) {
                        kept.lock().insert(id, body);
                        if reader.get_mut().write_all(b"HTTP/1.1 204 Fine\r\n\r\n").is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { url, told }
    }

    /// Types of events that came of a subject.
    pub(crate) fn types_of(&self, subject: &str) -> Vec<String> {
        let told = self.told.lock();
        let mut events: Vec<_> =
            told.values().filter(|event| event["subject"] == subject).collect();
        events.sort_by_key(|event| event["sequence"].as_u64());
        events.iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect()
    }
}

/// A request's `webhook-id` and body.
fn request(reader: &mut impl BufRead) -> Option<(String, Value)> {
    let (mut id, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(": ") {
            match name.to_ascii_lowercase().as_str() {
                "webhook-id" => id = value.to_owned(),
                "content-length" => length = value.parse().ok()?,
                _ => {}
            }
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((id, serde_json::from_slice(&body).ok()?))
}

#[test]
fn every_acknowledged_change_is_told_although_the_daemon_is_killed_again_and_again() {
    let mut world = World::with_env(&[("TORPOR_EGRESS_OUTGOING", r#"["127.0.0.0/8"]"#)]);
    let receiver = Receiver::start();
    let made = world.torpor(&["webhook", "create", &receiver.url, "--json"]).ok();
    let made: Value = serde_json::from_str(&made).unwrap();
    assert!(made["secret"].as_str().unwrap().starts_with("whsec_"));
    let mut ids = Vec::new();
    for round in 0..3 {
        let name = format!("web{round}");
        let body = json!({"name": name}).to_string();
        let head = "content-type: application/json\r\n";
        let created = world.request("POST", "/v1/sandboxes", head, body.as_bytes()).json();
        ids.push(created["id"].as_str().unwrap().to_owned());
        world.kill_daemon();
        world.start_daemon();
        world.torpor(&["sleep", &name]).ok();
        world.torpor(&["wake", &name]).ok();
        world.torpor(&["rm", &name]).ok();
        world.kill_daemon();
        world.start_daemon();
    }
    let expected = ["sandbox.created", "sandbox.slept", "sandbox.woke", "sandbox.ended"];
    for id in &ids {
        wait_for("every event", || (receiver.types_of(id) == expected).then_some(()));
    }
    // What came is what the log has, once each.
    let log: Value = serde_json::from_str(&world.torpor(&["events", "--json"]).ok()).unwrap();
    // The world itself was made before with a sandbox that is gone.
    let ours = |event: &&Value| ids.iter().any(|id| event["subject"] == *id);
    let log: Vec<_> = log["events"].as_array().unwrap().iter().filter(ours).collect();
    assert_eq!(log.len(), 12);
    let told = receiver.told.lock().clone();
    assert!(log.iter().all(|event| told.get(event["id"].as_str().unwrap()) == Some(*event)));
    assert_eq!(told.len(), 12, "nothing was invented");
}

#[test]
fn a_daemon_that_may_not_reach_private_addresses_tells_nobody_there() {
    let world = World::start();
    let receiver = Receiver::start();
    let refused = world.torpor(&["webhook", "create", &receiver.url]).fails(1);
    assert!(refused.contains("egress.outgoing"), "{refused}");
}
