//! What a root user tries from inside, on both engines: `tests/guest/hostile.py`. The host looks at itself before and
//! after.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use torpor_e2e::{GUEST, Internet, World};

use super::network::Surroundings;

/// Of the sandbox.
const MEMORY_MIB: u64 = 512;

/// Attempts of a program, as its source names them.
pub(super) fn names_in(group: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("guest/hostile_{group}.py"));
    let text = fs::read_to_string(path).unwrap();
    let named = text.lines().filter_map(|line| line.strip_prefix("@attempt(\"")?.split('"').next());
    named.map(str::to_owned).collect()
}

/// Makes the attempts of some groups in a sandbox: each was made, and held.
#[track_caller]
pub(super) fn all_hold_inside(world: &World, sandbox: &str, groups: &[&str], mut config: Value) {
    config["groups"] = json!(groups);
    config["engine"] = world.get("/v1/info").json()["engine"].clone();
    let program = format!("{GUEST}/hostile.py");
    let run = world.torpor(&["run", sandbox, "--", "python3", &program, &config.to_string()]);
    let made: BTreeMap<String, Value> = run
        .stdout
        .lines()
        .filter_map(|line| line.parse::<Value>().ok())
        .map(|line| (line["name"].as_str().unwrap_or_default().to_owned(), line))
        .collect();
    let wanted: BTreeSet<String> = groups.iter().flat_map(|group| names_in(group)).collect();
    let missing: Vec<_> = wanted.iter().filter(|name| !made.contains_key(*name)).collect();
    let through: Vec<_> = made.values().filter(|line| line["outcome"] != "held").collect();
    assert!(missing.is_empty(), "not made: {missing:#?}\n{}{}", run.stdout, run.stderr);
    assert!(through.is_empty(), "{through:#?}");
}

/// What nobody inside may change.
#[derive(Debug, PartialEq)]
struct Host {
    settings: Vec<String>,
    flag: String,
    clock_set: bool,
}

impl Host {
    const FLAG: &str = "the host's own";

    fn look(flag: &Path, began: (SystemTime, Duration)) -> Self {
        let names = ["core_pattern", "modprobe", "hostname", "sysrq", "randomize_va_space"];
        let setting = |name| fs::read_to_string(format!("/proc/sys/kernel/{name}"));
        let settings = names.map(|name| setting(name).unwrap_or_default()).to_vec();
        let wall = SystemTime::now().duration_since(began.0).unwrap_or_default();
        let apart = wall.abs_diff(uptime().saturating_sub(began.1));
        let flag = fs::read_to_string(flag).unwrap();
        Self { settings, flag, clock_set: apart > Duration::from_secs(3600) }
    }
}

/// The clock that nobody sets.
fn uptime() -> Duration {
    let text = fs::read_to_string("/proc/uptime").unwrap();
    Duration::from_secs_f64(text.split(' ').next().unwrap().parse().unwrap())
}

/// Everything but the network, of which `surroundings` knows.
fn tries_everything(world: &World, groups: &[&str], surroundings: Value) {
    let flag = world.path("flag");
    fs::write(&flag, Host::FLAG).unwrap();
    let began = (SystemTime::now(), uptime());
    let before = Host::look(&flag, began);
    let memory = format!("{MEMORY_MIB}m");
    world.create_with("bad", &["--memory", &memory, "--disk", "1g", "--idle-after", "never"]);
    world.create_with("good", &["--memory", "256m", "--disk", "1g", "--idle-after", "never"]);
    world.put_guest_programs("bad");
    let mut config = surroundings;
    config["flag_path"] = json!(flag);
    config["host_release"] =
        json!(fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim());
    config["memory_mib"] = json!(MEMORY_MIB);
    config["words"] = json!([world.data_dir(), format!("/run/torpor/{}", world.tag()), "TORPOR_"]);
    all_hold_inside(world, "bad", groups, config);
    assert_eq!(Host::look(&flag, began), before);
    assert_eq!(world.sh("bad", "echo alive").ok(), "alive\n");
    assert_eq!(world.sh("good", "echo fine").ok(), "fine\n");
    // What became of its agent's program is its own affair.
    world.create_with("next", &["--memory", "256m", "--disk", "1g"]);
    assert_eq!(world.sh("next", "echo fine").ok(), "fine\n");
    assert!(super::memory_of_daemon(world) < 500 << 20);
}

#[test]
fn what_a_root_user_tries_inside_gvisor_gets_nothing() {
    let world = World::start();
    tries_everything(&world, &["kernel", "limits", "agent"], json!({}));
    world.torpor(&["rm", "bad", "good", "next"]).ok();
    world.has_no_machines();
}

#[test]
fn what_a_root_user_tries_inside_a_microvm_gets_nothing() {
    let internet = Internet::with(&["api.test"]);
    let Some(world) = World::on_microvms_in(&internet) else { return };
    let surroundings = Surroundings::of(&world, &internet);
    let groups = ["kernel", "limits", "agent", "network"];
    tries_everything(&world, &groups, surroundings.config());
    surroundings.nobody_came();
}
