//! schedule create, ls, show, pause, resume, run, history, rm: against a daemon.

use serde_json::Value;

use crate::world::World;

#[test]
fn a_schedule_is_made_shown_paused_resumed_and_removed() {
    let world = World::new();
    let create =
        ["schedule", "create", "backup", "--cron", "0 3 * * *", "--timezone", "Europe/Berlin"];
    let command = ["--sandbox", "web", "--", "./backup"];
    assert_eq!(world.torpor([&create[..], &command].concat()).ok(), "backup\n");
    let table = world.torpor(["schedule", "ls"]).ok();
    assert!(table.starts_with("NAME") && table.contains("\nbackup"), "{table}");
    let shown = || -> Value {
        serde_json::from_str(&world.torpor(["schedule", "show", "backup", "--json"]).ok()).unwrap()
    };
    let made = shown();
    assert_eq!((&made["timezone"], &made["paused"]), (&"Europe/Berlin".into(), &false.into()));
    assert!(made["next_at"].is_string(), "{made}");
    assert!(world.torpor(["schedule", "show", "backup"]).ok().contains("./backup"));
    world.torpor(["schedule", "pause", "backup"]).ok();
    let paused = shown();
    assert_eq!((&paused["paused"], &paused["next_at"]), (&true.into(), &Value::Null));
    world.torpor(["schedule", "resume", "backup"]).ok();
    assert_eq!(shown()["next_at"], made["next_at"]);
    world.torpor(["schedule", "run", "backup"]).ok();
    assert!(world.torpor(["schedule", "history", "backup"]).ok().lines().count() == 2);
    world.torpor(["schedule", "rm", "backup"]).ok();
    assert_ne!(world.torpor(["schedule", "show", "backup"]).code, 0);
    assert_ne!(world.torpor(["schedule", "rm", "backup"]).code, 0);
    world.torpor(["schedule", "rm", "--force", "backup"]).ok();
}
