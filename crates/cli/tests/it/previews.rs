//! preview create, ls, show, rm and token.

use serde_json::{Value, json};
use torpor_protocol::ErrorCode;

use crate::stub::{Stub, done, ok, refuse};
use crate::world::World;

fn shown(name: &str, public: bool, more: Value) -> Value {
    let mut preview = json!({
        "id": format!("preview-{}", "a".repeat(21)), "name": name, "sandbox": "b".repeat(21),
        "port": 3000, "public": public, "label": "my-app", "prefix": true,
        "urls": ["http://my-app.localhost:8900/", "http://my-app.127-0-0-1.sslip.io:8900/"],
        "created_at": 1000, "updated_at": 1000,
    });
    preview.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    preview
}

fn stub() -> Stub {
    Stub::new(|asked| match asked.what.as_str() {
        "POST /v1/sandboxes/web/previews" => {
            let body = asked.json();
            let name = body["name"].as_str().unwrap_or("port-3000").to_owned();
            Some(ok(shown(&name, body["public"].as_bool().unwrap(), json!({}))))
        }
        "POST /v1/sandboxes/web/previews/port-3000/tokens" => Some(ok(json!({
            "id": format!("token-{}", "c".repeat(21)), "created_at": 1000, "expired": false,
            "token": "tpv_1", "urls": ["http://my-app.localhost:8900/?torpor_preview_token=tpv_1"],
        }))),
        "GET /v1/sandboxes/web/previews/a" => Some(ok(shown(
            "a",
            false,
            json!({
                "expires_at": 1000, "request_headers": {"x-in": "1\u{1b}[2J"}, "keep_open": true,
                "cors": ["https://a.example", "https://b.example"],
            }),
        ))),
        "GET /v1/sandboxes/web/previews" => {
            Some(ok(json!({"previews": [shown("a", true, json!({}))]})))
        }
        "DELETE /v1/sandboxes/web/previews/a" => Some(done()),
        "DELETE /v1/sandboxes/web/previews/b" => {
            Some(refuse(404, ErrorCode::NotFound, "the sandbox has no preview called b"))
        }
        _ => None,
    })
}

#[test]
fn a_private_preview_is_printed_with_its_token_and_a_public_one_without() {
    let stub = stub();
    let made = stub.torpor(["preview", "create", "web", "3000"]);
    assert!(made.stderr.contains("not shown again"), "{made:?}");
    assert_eq!(made.stdout, "http://my-app.localhost:8900/?torpor_preview_token=tpv_1\n");
    let public = ["preview", "create", "web", "3000", "--public"];
    assert_eq!(stub.torpor(public).ok(), "http://my-app.localhost:8900/\n");
    let json = stub.torpor(["preview", "create", "web", "3000", "--json"]).json();
    assert_eq!((&json["label"], &json["token"]["token"]), (&json!("my-app"), &json!("tpv_1")));
    assert_eq!(stub.torpor(["preview", "create", "web", "3000", "--public", "--token"]).code, 2);
    assert_eq!(stub.torpor(["preview", "create", "web", "0"]).code, 2);
    assert_eq!(stub.torpor(["preview", "create", "web", "80", "--prefix", "www"]).code, 2);
}

#[test]
fn what_a_preview_is_asked_to_be_is_passed_on() {
    let stub = stub();
    let words = "preview create web 3000 --name a --public --prefix my-app --ttl 1h --keep-open \
                 --request-header X-In:1 --response-header x-frame-options: \
                 --cors https://a.example https://b.example";
    stub.torpor(words.split_whitespace()).ok();
    let asked = stub.body_of("POST /v1/sandboxes/web/previews");
    let whole = json!({
        "port": 3000, "name": "a", "public": true, "prefix": "my-app", "ttl_ms": 3_600_000,
        "expires_at": null, "request_headers": {"x-in": "1"},
        "response_headers": {"x-frame-options": ""},
        "cors": ["https://a.example", "https://b.example"], "keep_open": true,
    });
    assert_eq!(asked, whole);
}

#[test]
fn previews_are_listed_shown_and_removed() {
    let stub = stub();
    assert_eq!(
        stub.torpor(["preview", "ls", "web"]).ok(),
        "SANDBOX   NAME   PORT   ACCESS   ENDS    URL\n\
         web       a      3000   public   never   http://my-app.localhost:8900/\n"
    );
    let text = stub.torpor(["preview", "show", "web", "a"]).ok();
    for line in [
        "access:         private",
        "url:            http://my-app.127-0-0-1.sslip.io:8900/",
        "ends:           1970-01-01T00:00:01Z",
        "request header: x-in: 1\\u{1b}[2J",
        "cors:           https://a.example, https://b.example",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line:?} is not in\n{text}");
    }
    assert_eq!(stub.torpor(["preview", "rm", "-f", "web", "b", "a"]).ok(), "a\n");
    let (code, words) = stub.torpor(["preview", "rm", "web", "b"]).failed();
    assert!(code == 1 && words.contains("hint: list them with: torpor preview ls web"), "{words}");
}

#[test]
fn a_preview_lives_from_its_creation_to_its_removal() {
    let world = World::with_sandbox();
    let made = world.torpor(["preview", "create", "web", "3000", "--json"]).json();
    assert_eq!(made["name"], "port-3000");
    let listed = world.torpor(["preview", "ls"]).ok();
    assert!(listed.lines().nth(1).unwrap().starts_with("web "), "{listed}");
    let other = world.torpor(["preview", "token", "create", "web", "port-3000", "--ttl", "10m"]);
    let url = other.stdout.trim();
    assert!(url.contains("/?torpor_preview_token=tpv_"), "{other:?}");
    let tokens = world.torpor(["preview", "token", "ls", "web", "port-3000"]).ok();
    assert_eq!(tokens.lines().count(), 3, "{tokens}");
    let id = made["token"]["id"].as_str().unwrap();
    let gone = world.torpor(["preview", "token", "rm", "web", "port-3000", id]).ok();
    assert_eq!(gone, format!("{id}\n"));
    assert_eq!(world.torpor(["preview", "rm", "web", "port-3000"]).ok(), "port-3000\n");
    let (code, words) = world.torpor(["preview", "show", "web", "port-3000"]).failed();
    assert!(code == 1 && words.contains("no preview called port-3000"), "{words}");
}
