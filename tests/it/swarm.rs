//! The swarm: tools are installed once, and forks of that moment analyse one project in five ways at
//! the same time.

use std::collections::BTreeSet;

use serde_json::Value;
use torpor_e2e::{World, wait_for};

/// A package with one module and one command, as a project that pip can install.
const PROJECT: &str = r#"
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "torpor-analysis"
version = "1.0"
[project.scripts]
analyze = "analysis:main"
"#;

/// Five analyses; they write their result where every fork has the same path.
const TOOL: &str = r#"
import ast, hashlib, json, pathlib, socket, sys

FILES = sorted(pathlib.Path("/srv/project").rglob("*.py"))
TREES = [(file, ast.parse(file.read_text())) for file in FILES]

def nodes(kind):
    return [node for _, tree in TREES for node in ast.walk(tree) if isinstance(node, kind)]

ANALYSES = {
    "1": ("lines", lambda: sum(len(file.read_text().splitlines()) for file in FILES)),
    "2": ("functions", lambda: sorted(node.name for node in nodes(ast.FunctionDef))),
    "3": ("imports", lambda: sorted({name.name for node in nodes(ast.Import) for name in node.names})),
    "4": ("complexity", lambda: len(nodes((ast.If, ast.For, ast.While))) + 1),
    "5": ("hash", lambda: hashlib.sha256(b"".join(file.read_bytes() for file in FILES)).hexdigest()),
}

def main():
    name, analyse = ANALYSES[sys.argv[1]]
    before = sorted(path.name for path in pathlib.Path("/srv/results").iterdir())
    result = analyse()
    pathlib.Path(f"/srv/results/{name}").write_text(json.dumps(result))
    print(json.dumps({"name": name, "result": result, "before": before, "host": socket.gethostname()}))
"#;

const SAMPLES: [(&str, &str); 2] = [
    (
        "one.py",
        "import os\nimport json\n\ndef load(path):\n    if path:\n        return json.load(open(path))\n",
    ),
    (
        "two.py",
        "import os\n\ndef each(items):\n    for item in items:\n        while item:\n            item -= 1\n",
    ),
];

/// A sandbox with the tools and a project, and a snapshot of it while a process runs.
fn base(world: &World) {
    world.create_with("base", &["--idle-after", "never"]);
    world.sh("base", "mkdir -p /srv/results").ok();
    world.put("base", "/opt/tools/pyproject.toml", PROJECT.as_bytes());
    world.put("base", "/opt/tools/analysis.py", TOOL.as_bytes());
    for (name, text) in SAMPLES {
        world.put("base", &format!("/srv/project/{name}"), text.as_bytes());
    }
    let install = "pip install --no-index --no-build-isolation --break-system-packages /opt/tools";
    world.sh("base", install).ok();
    world.start_counter("base");
    world.torpor(&["snapshot", "base", "--name", "ready"]).ok();
}

fn sandboxes(world: &World) -> Vec<Value> {
    world.get("/v1/sandboxes").json()["sandboxes"].as_array().unwrap().clone()
}

#[test]
fn five_forks_of_a_prepared_sandbox_do_five_analyses_at_once() {
    let world = World::start();
    base(&world);
    let args = ["map", "ready", "--count", "5", "--json", "--", "analyze", "{n}"];
    let tally: Value = serde_json::from_str(&world.torpor(&args).ok()).unwrap();
    let results = tally["results"].as_array().unwrap();
    assert_eq!((results.len(), &tally["failed"]), (5, &Value::from(0)), "{tally}");
    let said: Vec<Value> = results
        .iter()
        .map(|result| serde_json::from_str(result["stdout"].as_str().unwrap()).unwrap())
        .collect();
    let found = |name: &str| {
        let result = said.iter().find(|result| result["name"] == name);
        result.unwrap_or_else(|| panic!("no {name}: {tally}"))["result"].clone()
    };
    assert_eq!(found("lines"), 12);
    assert_eq!(found("functions"), serde_json::json!(["each", "load"]));
    assert_eq!(found("imports"), serde_json::json!(["json", "os"]));
    assert_eq!(found("complexity"), 4);
    assert_eq!(found("hash").as_str().unwrap().len(), 64);
    assert!(said.iter().all(|one| one["before"] == serde_json::json!([])), "isolated: {said:?}");
    let hosts: BTreeSet<_> = said.iter().map(|one| one["host"].to_string()).collect();
    assert_eq!(hosts.len(), 5, "each is somebody of its own: {hosts:?}");
    assert!(tally["speed_up"].as_f64().unwrap() > 0.0, "{tally}");
    let left: Vec<_> = sandboxes(&world).iter().map(|one| one["name"].clone()).collect();
    assert_eq!(left, ["base"], "the forks are gone");
}

#[test]
fn a_swarm_says_how_much_faster_it_was_and_its_forks_can_be_kept() {
    let world = World::start();
    base(&world);
    let named = ["map", "ready", "--count", "5", "--keep", "--name", "agent-{n}"];
    let shown = world.torpor(&[named.as_slice(), &["--", "analyze", "{n}"]].concat()).ok();
    for line in ["succeeded", "5 of 5", "one by one", "together", "speed-up", "efficiency"] {
        assert!(shown.contains(line), "{line} is missing: {shown}");
    }
    let names = ["lines", "functions", "imports", "complexity", "hash"];
    for (n, name) in names.iter().enumerate() {
        let fork = format!("agent-{}", n + 1);
        assert_eq!(world.sh(&fork, "ls /srv/results").ok(), format!("{name}\n"));
    }
    assert_eq!(world.sh("base", "ls /srv/results").ok(), "", "their origin sees nothing of it");
    // What ran when they were made runs in each, and goes its own way.
    let seeds: BTreeSet<_> = (1..=5).map(|n| world.count(&format!("agent-{n}")).seed).collect();
    assert_eq!(seeds.len(), 1, "the same process in all: {seeds:?}");
    world.torpor(&["rm", "--all", "--yes"]).ok();
    world.torpor(&["snapshot", "rm", "ready"]).ok();
    world.has_no_machines();
    let saves = || std::fs::read_dir(world.data_dir().join("saves")).map_or(0, Iterator::count);
    wait_for("the last save to go", || (saves() == 0).then_some(()));
}
