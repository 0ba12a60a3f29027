//! Keys of clients, and what clients can't do with them.

use http::Method;
use serde_json::{Value, json};
use torpor_daemon::ShutdownMode;

use super::{Keyed, SERVERS, text};
use crate::client::{self, Answer};

impl Keyed {
    async fn agent(&self, method: Method, path: &str, body: Value) -> Answer {
        let mut request = client::with_json(method, path, &body);
        request.headers_mut().insert("authorization", self.bearer.parse().unwrap());
        client::send(self.world.address, request).await
    }

    async fn set(&self, policy: Value) {
        let path = format!("/v1/mcp/gateway/clients/{}", self.id);
        self.root(Method::PUT, &path, policy).await.expect(200);
    }
}

#[tokio::test]
async fn a_key_with_a_policy_opens_the_gateway_and_nothing_else() {
    let mut keyed = Keyed::new().await;
    let policy = format!("/v1/mcp/gateway/clients/{}", keyed.id);
    keyed.agent(Method::GET, "/v1/sandboxes", json!({})).await.expect(200);
    let itself = keyed.agent(Method::PUT, &policy, json!({"rules": [{}]})).await;
    let told = itself.expect_error(400, "invalid_request");
    assert!(told["hint"].as_str().unwrap().contains("torpor key create"), "{told}");

    keyed.set(json!({"rules": [{"server": "a", "tool": "read"}]})).await;
    for _ in 0..2 {
        for (method, path) in [
            (Method::PUT, policy.as_str()),
            (Method::DELETE, policy.as_str()),
            (Method::POST, SERVERS),
            (Method::GET, SERVERS),
            (Method::POST, "/v1/mcp/gateway/servers/a/approve"),
            (Method::GET, "/v1/mcp/gateway/calls"),
            (Method::POST, "/v1/keys"),
            (Method::GET, "/v1/sandboxes"),
            (Method::GET, "/metrics"),
        ] {
            let refused = keyed.agent(method, path, json!({"rules": [{}]})).await;
            assert_eq!(refused.status, 403, "{path}: {}", refused.text());
        }
        assert_eq!(text(&keyed.call("a_read", "on").await), "on");
        // The same after a restart.
        keyed.world.restart(ShutdownMode::Running).await;
    }
    keyed.root(Method::DELETE, &policy, json!({})).await.expect(204);
    keyed.agent(Method::GET, "/v1/sandboxes", json!({})).await.expect(200);
}

#[tokio::test]
async fn names_that_a_client_makes_up_are_no_labels_and_use_no_room_for_limits() {
    let keyed = Keyed::new().await;
    keyed.set(json!({"rules": [{"calls_per_minute": 1, "arguments_max_bytes": 100}]})).await;
    assert_eq!(text(&keyed.call("a_read", "one").await), "one");
    for n in 0..3 {
        let large = keyed.call(&format!("a_made-up-{n}"), &"x".repeat(200)).await;
        assert!(text(&large).contains("100 are allowed"), "{large}");
        for _ in 0..2 {
            let unknown = keyed.call(&format!("a_made-up-{n}"), "x").await;
            assert_eq!(unknown["error"]["code"], -32602, "not limited, but not there: {unknown}");
        }
    }
    assert!(text(&keyed.call("a_read", "two").await).contains("retry in"));
    let metrics = keyed.root(Method::GET, "/metrics", json!({})).await.text();
    let counted = |outcome: &str| {
        format!(r#"torpor_mcp_calls_total{{server="a",tool="read",outcome="{outcome}"}} 1"#)
    };
    assert!(metrics.contains(&counted("ok")), "{metrics}");
    assert!(metrics.contains(&counted("rate_limited")), "{metrics}");
    assert!(metrics.contains("torpor_mcp_call_seconds"), "{metrics}");
    assert!(!metrics.contains("made-up"), "{metrics}");
}

#[tokio::test]
async fn calls_of_what_is_not_there_do_not_push_out_what_others_called() {
    let keyed = Keyed::new().await;
    keyed.set(json!({"rules": [{}]})).await;
    assert_eq!(text(&keyed.call("a_read", "one").await), "one");
    for n in 0..70 {
        keyed.call(&format!("a_none{n}"), "x").await;
    }
    assert_eq!(text(&keyed.call("a_read", "two").await), "two");
    let calls = keyed.root(Method::GET, "/v1/mcp/gateway/calls", json!({})).await.expect(200);
    let calls = calls["calls"].as_array().unwrap();
    let of = |outcome: &str| calls.iter().filter(|call| call["outcome"] == outcome).count();
    assert!(of("ok") == 2 && (60..65).contains(&of("refused")), "{}", of("refused"));
}

#[tokio::test]
async fn the_policy_of_a_key_goes_with_it() {
    let keyed = Keyed::new().await;
    keyed.set(json!({"rules": [{}]})).await;
    let key = format!("/v1/keys/{}", keyed.id);
    keyed.root(Method::DELETE, &key, json!({})).await.expect(204);
    let clients = keyed.root(Method::GET, "/v1/mcp/gateway/clients", json!({})).await.expect(200);
    assert_eq!(clients["clients"], json!([]));
    let refused = keyed.list(&[("authorization", keyed.bearer.as_str())]).await;
    assert_eq!(refused.status, 401);
}
