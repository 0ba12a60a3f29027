//! Which sandbox a request is for, and who may ask.

use serde_json::json;

use super::Place;
use crate::client::{Answer, Ask};

impl Place {
    async fn health(&self, host: &str, headers: &[(&str, &str)]) -> Answer {
        let ask = Ask::new("GET", "/api/v1/health").host(host);
        let ask = headers.iter().fold(ask, |ask, (name, value)| ask.header(name, value));
        self.send(ask).await
    }

    async fn id(&self) -> String {
        self.world.info("web").await["id"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn the_host_names_a_sandbox_by_id_or_name() {
    let place = Place::new().await;
    let id = place.id().await;
    for host in ["web.local", "web.local:8900", &format!("{id}.local")] {
        assert_eq!(place.health(host, &[]).await.expect(200), json!({"healthy": true}), "{host}");
    }
}

#[tokio::test]
async fn the_header_names_a_sandbox_at_a_host_that_is_ours() {
    let place = Place::new().await;
    let id = place.id().await;
    for name in ["web", &*id] {
        let named = [("X-Tensorlake-Sandbox-Id", name)];
        for host in ["localhost:8900", "127.0.0.1"] {
            place.health(host, &named).await.expect(200);
        }
        for host in ["other.local", "evil.example"] {
            place.health(host, &named).await.expect_error(401, "UNAUTHENTICATED");
        }
    }
}

#[tokio::test]
async fn who_names_no_sandbox_is_told_so() {
    let place = Place::new().await;
    place.health("localhost", &[]).await.expect_error(400, "MISSING_SANDBOX_ID");
    place.health("nope.local", &[]).await.expect_error(404, "SANDBOX_NOT_FOUND");
    place.health("No_Name.local", &[]).await.expect_error(404, "SANDBOX_NOT_FOUND");
    let both = place.ask("GET", "/health").host("other.local");
    place.send(both).await.expect_error(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn pages_of_this_host_may_ask_and_those_of_others_may_not() {
    let place = Place::new().await;
    place.health("web.local", &[("origin", "http://localhost:8900")]).await.expect(200);
    let foreign = place.health("web.local", &[("origin", "https://evil.example")]).await;
    foreign.expect_error(401, "UNAUTHENTICATED");
    // A name that somebody may have pointed at this host.
    let rebound = place.health("evil.example", &[("X-Tensorlake-Sandbox-Id", "web")]).await;
    rebound.expect_error(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_request_wakes_the_sandbox_unless_it_may_not() {
    let place = Place::new().await;
    place.suspend().await;
    let info = place.get("/info").await.expect(200);
    assert!(info["version"].as_str().is_some_and(|version| !version.is_empty()), "{info}");
    for number in ["uptime_secs", "running_processes", "total_processes"] {
        assert!(info[number].is_u64(), "{number} {info}");
    }
    let stays = json!({"standby": {"auto_wake": false}});
    place.world.own("PATCH", "/sandboxes/web", Some(stays)).await.expect(200);
    place.suspend().await;
    place.get("/health").await.expect_error(409, "SANDBOX_NOT_RUNNING");
    place.resume().await;
    place.get("/health").await.expect(200);
}

#[tokio::test]
async fn nothing_inside_wakes_a_sandbox_on_a_host_without_room() {
    let place = Place::new().await;
    let sleep = Some(json!({"cold": true}));
    place.world.own("POST", "/sandboxes/web/sleep", sleep).await.expect(200);
    place.world.leave_free(0);
    for path in ["/processes", "/files?path=/etc/hostname", "/files/list?path=/"] {
        place.get(path).await.expect_error(429, "CAPACITY_REACHED");
    }
    let refused = place.post("/processes/run", &json!({"command": "true"})).await;
    refused.expect_error(429, "CAPACITY_REACHED");
    assert!(place.try_socket("/tunnels/tcp?port=80", &[]).await.is_err());
    assert!(place.world.host.alive().is_empty());
    place.world.leave_free(u64::MAX);
    place.get("/processes").await.expect(200);
}
