//! service deploy.

use serde_json::{Value, json};
use torpor_protocol::ErrorCode;

use crate::stub::{Stub, ok, refuse};

fn shop(public: bool) -> Value {
    json!({
        "id": format!("svc-{}", "a".repeat(21)), "name": "shop", "public": public,
        "urls": ["http://shop.localhost:8900/"], "traffic": [], "instances": [],
        "scale": {"min": 0, "max": 5, "concurrency": 80, "idle_after_ms": 60000},
        "revisions": [{
            "number": 2, "state": "ready", "image": "web", "image_id": "b".repeat(64),
            "command": ["serve"], "port": 8080, "env": {}, "secrets": [], "health": {},
            "resources": {"cpus": 1.0, "memory_mib": 512, "disk_mib": 1024, "pids": 1024},
            "network": {}, "engine": null, "no_snapshot": false, "no_traffic": false,
            "created_at": 1000,
        }],
        "created_at": 1000, "updated_at": 1000,
    })
}

fn token(more: Value) -> Value {
    let id = format!("token-{}", "c".repeat(21));
    let mut token = json!({"id": id, "created_at": 1000, "expired": false});
    token.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    token
}

/// A daemon with a service of this kind and these tokens.
fn stub(public: bool, tokens: Value) -> Stub {
    Stub::new(move |asked| match asked.what.as_str() {
        "POST /v1/services" | "GET /v1/services/shop" => Some(ok(shop(public))),
        "GET /v1/services/shop/tokens" => Some(ok(json!({"tokens": tokens}))),
        "POST /v1/services/shop/tokens" => Some(ok(token(json!({
            "token": "tpv_1", "urls": ["http://shop.localhost:8900/?torpor_preview_token=tpv_1"],
        })))),
        _ => Some(refuse(404, ErrorCode::NotFound, "nobody asks for this")),
    })
}

#[test]
fn the_address_of_a_private_service_is_printed_with_a_token_if_it_has_none() {
    let deploy = ["service", "deploy", "web", "--name", "shop"];
    let opens = "http://shop.localhost:8900/?torpor_preview_token=tpv_1\n";
    assert_eq!(stub(false, json!([])).torpor(deploy).ok(), opens);
    let bare = "http://shop.localhost:8900/\n";
    assert_eq!(stub(false, json!([token(json!({}))])).torpor(deploy).ok(), bare);
    assert_eq!(stub(true, json!([])).torpor(deploy).ok(), bare);
}
