//! What the audit log promises.

use std::os::unix::fs::MetadataExt;

use torpor_protocol::egress::EgressKind;

use super::*;

struct World {
    layout: Arc<Layout>,
    _dir: tempfile::TempDir,
}

fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    World { layout: Arc::new(Layout::open(dir.path()).unwrap()), _dir: dir }
}

impl World {
    fn log(&self) -> AuditLog {
        AuditLog::open(Arc::clone(&self.layout)).unwrap()
    }

    /// Whose files are full after so many bytes.
    fn small_log(&self, file_max: u64) -> AuditLog {
        AuditLog::with(Arc::clone(&self.layout), file_max, QUEUE).unwrap()
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.layout.audit(0)).unwrap()
    }
}

fn event(sandbox: &SandboxId, at_ms: u64) -> Arc<EgressEvent> {
    Arc::new(EgressEvent {
        at_ms,
        sandbox: sandbox.clone(),
        what: EgressKind::Http,
        verdict: Verdict::Allowed,
        rule: "internet".to_owned(),
        host: Some("api.example.com".to_owned()),
        address: None,
        port: Some(443),
        method: Some("GET".to_owned()),
        path: Some("/v1".to_owned()),
        secrets: Vec::new(),
        gateway: None,
    })
}

async fn times(log: &AuditLog, of: Option<&SandboxId>, limit: usize) -> Vec<u64> {
    log.recent(of, None, u64::MAX, limit).await.unwrap().iter().map(|event| event.at_ms).collect()
}

#[tokio::test]
async fn events_are_found_again_by_sandbox_and_by_all() {
    let world = world();
    let (one, other) = (SandboxId::random(), SandboxId::random());
    let log = world.log();
    for at_ms in 1..=6 {
        log.note(event(if at_ms % 2 == 0 { &one } else { &other }, at_ms));
    }
    assert_eq!(times(&log, Some(&one), 2).await, [4, 6]);
    assert_eq!(times(&log, Some(&other), 10).await, [1, 3, 5]);
    assert_eq!(times(&log, None, 4).await, [3, 4, 5, 6]);
    assert_eq!(times(&log, Some(&SandboxId::random()), 4).await, [0; 0]);
    assert_eq!(
        log.recent(Some(&one), None, u64::MAX, 1).await.unwrap(),
        [(*event(&one, 6)).clone()]
    );
    assert_eq!(log.recent(Some(&one), Some(Verdict::Denied), u64::MAX, 1).await.unwrap(), []);
    assert_eq!(log.recent(None, Some(Verdict::Allowed), u64::MAX, 9).await.unwrap().len(), 6);
}

#[tokio::test]
async fn the_next_daemon_finds_what_the_last_one_wrote() {
    let world = world();
    let id = SandboxId::random();
    let log = world.log();
    log.note(event(&id, 1));
    log.flush().await;
    drop(log);
    let log = world.log();
    log.note(event(&id, 2));
    assert_eq!(times(&log, Some(&id), 10).await, [1, 2]);
}

#[tokio::test]
async fn a_torn_line_costs_that_line_only() {
    let world = world();
    let id = SandboxId::random();
    let log = world.log();
    log.note(event(&id, 1));
    log.note(event(&id, 2));
    log.flush().await;
    drop(log);
    let torn = world.text().trim_end().to_owned();
    std::fs::write(world.layout.audit(0), &torn[..torn.len() - 5]).unwrap();
    let log = world.log();
    log.note(event(&id, 3));
    assert_eq!(times(&log, Some(&id), 10).await, [1, 3]);
}

#[tokio::test]
async fn full_files_are_kept_up_to_four_and_read_as_one() {
    let world = world();
    let id = SandboxId::random();
    let line = serde_json::to_vec(&*event(&id, 10)).unwrap().len() as u64 + 1;
    let log = world.small_log(3 * line);
    for at_ms in 10..40 {
        log.note(event(&id, at_ms));
        // One by one, so that every write is one line.
        log.flush().await;
    }
    assert_eq!(times(&log, Some(&id), 100).await, (28..40).collect::<Vec<_>>());
    assert_eq!(times(&log, Some(&id), 5).await, (35..40).collect::<Vec<_>>());
    for before in 0..FILES {
        let about = std::fs::metadata(world.layout.audit(before)).unwrap();
        assert!(about.len() <= 3 * line, "{before}");
        assert_eq!(about.mode() & 0o777, 0o600);
    }
    assert!(!world.layout.audit(FILES).exists());
}

#[tokio::test]
async fn what_is_lost_is_counted_in_the_file() {
    let world = world();
    let id = SandboxId::random();
    let log = world.log();
    log.lose(3);
    let mut long = (*event(&id, 5)).clone();
    long.path = Some("x".repeat(LINE_MAX));
    log.note(Arc::new(long));
    log.note(event(&id, 6));
    assert_eq!(times(&log, Some(&id), 10).await, [6]);
    let lost = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["lost"].as_u64().unwrap_or(0)
    };
    assert_eq!(world.text().lines().map(lost).sum::<u64>(), 4);
}

#[tokio::test]
async fn a_queue_that_is_full_loses_events_and_does_not_wait() {
    let world = world();
    let id = SandboxId::random();
    let log = AuditLog::with(Arc::clone(&world.layout), FILE_MAX, 1).unwrap();
    for at_ms in 0..10_000 {
        log.note(event(&id, at_ms));
    }
    let kept = times(&log, Some(&id), 10_000).await.len() as u64;
    // The last ones may have been lost after the last write; another one tells.
    log.note(event(&id, 10_001));
    log.flush().await;
    let lost = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["lost"].as_u64().unwrap_or(0)
    };
    assert_eq!(kept + world.text().lines().map(lost).sum::<u64>(), 10_000);
    assert!(kept < 10_000, "the queue was never full");
}
