//! The description of the API: up to date, and sound in itself.

use std::path::Path;

use serde_json::Value;

fn described() -> Value {
    torpor_daemon::api::openapi()
}

#[test]
fn the_committed_description_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../openapi.json");
    let text = format!("{}\n", serde_json::to_string_pretty(&described()).unwrap());
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == text, "run `UPDATE=1 cargo test -p torpor-daemon` and commit");
}

#[test]
fn every_reference_leads_somewhere() {
    let api = described();
    let mut found = 0;
    visit(&api, &mut |value| {
        if let Some(reference) = value.get("$ref").and_then(Value::as_str) {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(api.pointer(pointer).is_some(), "{reference} leads nowhere");
            found += 1;
        }
    });
    assert!(found > 50, "{found}");
}

#[test]
fn every_choice_says_how_its_kinds_are_told_apart_and_no_name_is_of_our_language() {
    let api = described();
    let mut choices = 0;
    visit(&api, &mut |value| {
        let Some(kinds) = value.get("oneOf").and_then(Value::as_array) else { return };
        let mapping = value["discriminator"]["mapping"].as_object().unwrap();
        assert_eq!(mapping.len(), kinds.len(), "{value}");
        choices += 1;
    });
    assert!(choices >= 2, "{choices}");
    let schemas = api["components"]["schemas"].as_object().unwrap();
    for name in ["Sandbox", "Snapshot", "Error", "SandboxList", "RunEventExited"] {
        assert!(schemas.contains_key(name), "{name}");
    }
    for name in ["BTreeMap", "Status", "Vec", "Option"] {
        assert!(!schemas.contains_key(name), "{name}");
    }
}

fn visit(value: &Value, look: &mut impl FnMut(&Value)) {
    look(value);
    match value {
        Value::Object(map) => map.values().for_each(|value| visit(value, look)),
        Value::Array(list) => list.iter().for_each(|value| visit(value, look)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn every_operation_is_described_with_its_errors() {
    let api = described();
    let mut ids = std::collections::BTreeSet::new();
    let mut operations = 0;
    for (path, item) in api["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            operations += 1;
            let place = format!("{method} {path}");
            assert!(operation["summary"].is_string(), "{place} has no summary");
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{place}: {id} is taken");
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.contains_key("default"), "{place} does not say how it fails");
            assert!(responses.len() > 1, "{place} never succeeds");
            for (status, response) in responses {
                let text = response["description"].as_str().unwrap_or_default();
                assert!(!text.is_empty(), "{place} {status} has no description");
            }
        }
    }
    assert!(operations >= 30, "{operations}");
}

#[test]
fn only_paths_and_the_names_of_files_are_required() {
    for (path, item) in described()["paths"].as_object().unwrap() {
        for parameter in
            item.as_object().unwrap().values().flat_map(|operation| {
                operation["parameters"].as_array().cloned().unwrap_or_default()
            })
        {
            // The root of a snapshot is where one begins to look.
            let rooted = path == "/v1/snapshots/{snapshot}/files/list";
            let named = parameter["name"] == "path" && !rooted;
            let required = parameter["in"] == "path" || named;
            assert_eq!(parameter["required"], required, "{path}: {parameter}");
        }
    }
}

#[test]
fn every_parameter_of_a_path_is_declared() {
    for (path, item) in described()["paths"].as_object().unwrap() {
        let named = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        for name in named {
            for (method, operation) in item.as_object().unwrap() {
                let declared = operation["parameters"].as_array().unwrap().iter();
                let declared = declared.filter(|p| p["in"] == "path" && p["name"] == name).count();
                assert_eq!(declared, 1, "{method} {path}: {name}");
            }
        }
    }
}
