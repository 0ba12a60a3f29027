//! A preview in a real browser: Chromium without a window.

use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use torpor_e2e::{GUEST, TIERS, World, request, wait_for};

/// Killed when the test is over, with all its helpers.
struct Browser {
    process: Child,
    _profile: TempDir,
}

impl Browser {
    fn open(url: &str) -> Self {
        let profile = tempfile::Builder::new().prefix("torpor-browser-").tempdir().unwrap();
        let process = Command::new("chromium")
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"])
            .args(["--disable-dev-shm-usage", "--disable-extensions", "--disable-sync"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            // It stays until it is killed.
            .args(["--remote-debugging-port=0", url])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromium is installed: ./test installs it");
        Self { process, _profile: profile }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_private_page_with_a_websocket_works_in_a_browser_also_after_sleep() {
    let world = World::start();
    world.create("web");
    world.put_guest_programs("web");
    world.start_process("web", &["python3", &format!("{GUEST}/page.py")]);
    let made = world.post("/v1/sandboxes/web/previews", &json!({"port": 3000, "name": "page"}));
    assert_eq!(made.status, 201, "{made:?}");
    let token = world.post("/v1/sandboxes/web/previews/page/tokens", &json!({}));
    assert_eq!(token.status, 201, "{token:?}");
    let urls = token.json()["urls"].clone();
    let local = |url: &&Value| url.as_str().is_some_and(|url| url.contains(".localhost"));
    let url =
        urls.as_array().unwrap().iter().find(local).and_then(Value::as_str).unwrap().to_owned();
    for (number, tier) in TIERS.into_iter().enumerate() {
        world.sleep("web", tier);
        let browser = Browser::open(&url);
        let seen = wait_for("the page to report", || {
            let seen = world.sh("web", "cat /tmp/seen").stdout;
            seen.lines().nth(number).map(str::to_owned)
        });
        drop(browser);
        // Neither the page nor the application sees the token: it is in a cookie of ours.
        assert_eq!(seen, "echo 1: a word | no query | no cookie", "{tier}");
    }
    let heads = world.sh("web", "cat /tmp/heads").ok();
    assert!(heads.contains("GET / HTTP/1.1") && !heads.contains("torpor_preview"), "{heads}");
    let host = url.trim_start_matches("http://").split('/').next().unwrap();
    let stranger = request(world.address(), "GET", "/", &format!("host: {host}\r\n"), b"");
    assert_eq!(stranger.status, 401, "{stranger:?}");
}
