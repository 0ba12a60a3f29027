//! What may leave, as it is asked for and shown; `torpor egress`.

use serde_json::{Value, json};

use crate::stub::{Answer, Stub, ok};
use crate::world::World;

const ID: &str = "000000000000000000000";

fn event(at_ms: u64, verdict: &str) -> Value {
    json!({
        "at": torpor_protocol::time::text(at_ms), "sandbox": ID, "what": "tls", "verdict": verdict, "rule": "allow",
        "host": "api.example.com", "port": 443,
    })
}

#[test]
fn a_policy_is_written_on_the_command_line_and_shown_readably() {
    let world = World::new();
    let set = ["secret", "set", "KEY", "--host", "api.example.com", "--host", "*.example.org"];
    world.torpor_with(set, b"kept well").ok();
    let table = world.torpor(["secret", "ls"]).ok();
    assert!(table.contains("api.example.com,*.example.org"), "{table}");
    let args = [
        "create",
        "--name",
        "web",
        "--no-internet",
        "--allow",
        "GET,HEAD api.example.com/v1/",
        "--allow",
        "*.example.org",
        "--deny",
        "bad.example.org",
        "--route",
        "api.example.com: Authorization=Bearer {{SECRET:KEY}}",
        "--grant",
        "KEY",
        "--bandwidth",
        "10mb/s",
        "--connections",
        "100",
        "--connection-rate",
        "20",
        "--json",
    ];
    let made = world.torpor(args).json();
    assert_eq!(
        made["network"],
        json!({
            "internet": false,
            "allow": ["GET,HEAD api.example.com/v1/", "*.example.org"],
            "deny": ["bad.example.org"],
            "routes": [{
                "hosts": ["api.example.com"],
                "headers": {"Authorization": "Bearer {{SECRET:KEY}}"},
            }],
            "secrets": ["KEY"],
            "limits": {"bytes_per_sec": 10_485_760, "connections_per_sec": 20, "connections": 100},
        })
    );
    let shown = world.torpor(["inspect", "web"]).ok();
    for line in [
        "internet:      only GET,HEAD api.example.com/v1/, *.example.org, never bad.example.org",
        "route:         api.example.com; header Authorization=Bearer {{SECRET:KEY}}",
        "placeholders:  KEY",
        "limits:        10.0 MiB/s, 100 connections, 20 new connections/s",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
    }
    let words =
        "update web --internet on --no-allow --no-deny --no-route --no-grant --no-limits --json";
    let changed = world.torpor(words.split(' ')).json();
    assert_eq!(changed["network"], json!({"internet": true}));
}

#[test]
fn the_full_form_of_a_route_comes_from_a_file() {
    let world = World::with_sandbox();
    let route = json!({
        "hosts": ["api.example.com"], "methods": ["POST"], "paths": ["/v1/"],
        "body": {"token": "t"}, "query": {"key": "k"},
    });
    std::fs::write(world.here.join("one.json"), route.to_string()).unwrap();
    std::fs::write(world.here.join("two.json"), json!([route, route]).to_string()).unwrap();
    let args = ["update", "web", "--route-file", "one.json", "--route-file", "two.json", "--json"];
    let changed = world.torpor(args).json();
    assert_eq!(changed["network"]["routes"], json!([route, route, route]));
    std::fs::write(world.here.join("bad.json"), r#"{"hosts": [], "heders": {}}"#).unwrap();
    let (code, words) = world.torpor(["update", "web", "--route-file", "bad.json"]).failed();
    assert!(code == 2 && words.contains("heders"), "{words}");
}

#[test]
fn a_policy_that_can_not_be_kept_is_refused_with_the_reason() {
    let world = World::with_sandbox();
    for (args, word) in [
        (["--allow", "10.0.0.0/8"], "egress.private"),
        (["--gateway", "office"], "office"),
        (["--route", "a.example: X={{SECRET:NOBODY}}"], "NOBODY"),
        (["--route", "a.example: X={{SECRET:NOBODY"], "not closed"),
        (["--grant", "NOBODY"], "NOBODY"),
    ] {
        let (code, words) = world.torpor(["update", "web"].into_iter().chain(args)).failed();
        assert!(code == 1 && words.contains(word), "{words}");
    }
}

#[test]
fn tail_shows_events_as_they_come_and_says_what_it_missed() {
    let line = |mut event: Value| {
        event["event"] = json!("egress");
        event
    };
    let missed = json!({"event": "missed", "missed": 3});
    let lines = [line(event(1_800_000_000_250, "denied")), missed, line(event(2, "allowed"))];
    let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let stub = Stub::new(move |_| Some(Answer::Now(200, body.clone().into())));
    let done = stub.torpor(["egress", "tail", "web", "-n", "5", "--denied"]);
    assert_eq!(
        done.stdout,
        "2027-01-15T08:00:00.250Z denied  tls   api.example.com:443 (allow)\n\
         1970-01-01T00:00:00.002Z allowed tls   api.example.com:443 (allow)\n"
    );
    assert!(done.stderr.contains("3 events"), "{}", done.stderr);
    let json = stub.torpor(["egress", "tail", "--json"]).ok();
    let printed: Vec<Value> =
        json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(printed, lines);
    let all = stub.torpor(["egress", "tail"]).ok();
    assert!(all.contains(&format!("Z {ID} denied")), "{all}");
    assert_eq!(
        stub.asked(),
        [
            "GET /v1/sandboxes/web/egress?limit=5&verdict=denied&follow=true",
            "GET /v1/egress?limit=10&follow=true",
            "GET /v1/egress?limit=10&follow=true",
        ]
    );
}

#[test]
fn events_and_gateways_are_listed() {
    let stub = Stub::new(|asked| {
        Some(match asked.what.as_str() {
            "GET /v1/gateways" => {
                ok(json!({"gateways": [{"name": "office", "through": "source 203.0.113.9"}]}))
            }
            "GET /v1/sandboxes/web/egress?limit=100" => ok(json!({"events": [event(1, "failed")]})),
            _ => return None,
        })
    });
    let shown = stub.torpor(["egress", "ls", "web"]).ok();
    assert_eq!(shown, "1970-01-01T00:00:00.001Z failed  tls   api.example.com:443 (allow)\n");
    assert_eq!(
        stub.torpor(["egress", "ls", "web", "--json"]).json()["events"][0]["at"],
        "1970-01-01T00:00:00.001Z"
    );
    let table = stub.torpor(["egress", "gateways"]).ok();
    let words: Vec<&str> = table.split_whitespace().collect();
    assert_eq!(words, ["NAME", "THROUGH", "office", "source", "203.0.113.9"]);
    let json = stub.torpor(["egress", "gateways", "--json"]).json();
    assert_eq!(json["gateways"][0]["name"], "office");
}

#[test]
fn a_real_daemon_has_nothing_to_tell_of_a_quiet_sandbox() {
    let world = World::with_sandbox();
    assert_eq!(world.torpor(["egress", "ls", "web"]).ok(), "");
    assert_eq!(world.torpor(["egress", "ls", "web", "--json"]).json(), json!({"events": []}));
    assert_eq!(world.torpor(["egress", "gateways", "--json"]).json(), json!({"gateways": []}));
    let (code, words) = world.torpor(["egress", "ls", "wep"]).failed();
    assert!(code == 1 && words.contains("did you mean web?"), "{words}");
}
