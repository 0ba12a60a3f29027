//! What goes in and out, and who is woken for it.

use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::net::TcpListener;

use super::{BROWSER, asked, echo, host_of, preview, sleep, state, visit};
use crate::client::send;
use crate::world::World;

#[tokio::test]
async fn headers_are_set_on_the_way_in_and_out() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let rules = json!({
        "port": port, "public": true,
        "request_headers": {"X-In": "ours"},
        "response_headers": {"X-App": "ours", "X-Frame-Options": "", "X-New": "1"},
    });
    let made = preview(&world, rules).await;
    let answer = visit(&world, &made, "/", &[("x-in", "theirs")]).await;
    assert!(answer.text().contains("x-in: ours") && !answer.text().contains("theirs"));
    assert_eq!((answer.header("x-app"), answer.header("x-new")), ("ours", "1"));
    assert!(!answer.headers.contains_key("x-frame-options"));
}

#[tokio::test]
async fn a_preflight_is_answered_without_waking_anybody_or_asking_for_a_token() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let cors = json!({"port": port, "cors": ["https://app.example.com"]});
    let made = preview(&world, cors).await;
    sleep(&world).await;
    let ask = [
        ("origin", "https://app.example.com"),
        ("access-control-request-method", "PUT"),
        ("access-control-request-headers", "x-torpor-preview-token"),
    ];
    let answer = send(world.address, asked(Method::OPTIONS, "/", &host_of(&made), &ask)).await;
    assert_eq!(answer.status, 204);
    assert_eq!(answer.header("access-control-allow-origin"), "https://app.example.com");
    assert_eq!(answer.header("access-control-allow-headers"), "x-torpor-preview-token");
    assert_eq!(answer.header("vary"), "Origin");
    assert_eq!(state(&world).await, "asleep");
    let refused = visit(&world, &made, "/", &[ask[0]]).await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.header("access-control-allow-origin"), "https://app.example.com");
    assert_eq!(state(&world).await, "asleep", "who may not come wakes nobody");
}

#[tokio::test]
async fn a_visitor_wakes_the_sandbox() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    for headers in [&[][..], &[BROWSER]] {
        sleep(&world).await;
        assert_eq!(visit(&world, &made, "/", headers).await.status, 200);
        assert_eq!(state(&world).await, "running");
    }
}

#[tokio::test]
async fn a_sandbox_that_does_not_wake_by_itself_is_left_asleep_and_people_are_told() {
    let world = World::new().await;
    let standby = json!({"auto_wake": false});
    world.create(json!({"name": "web", "standby": standby})).await.expect(201);
    let made = preview(&world, json!({"port": 80, "public": true})).await;
    sleep(&world).await;
    visit(&world, &made, "/", &[]).await.expect_error(409, "sandbox_asleep");
    let page = visit(&world, &made, "/", &[BROWSER]).await;
    assert_eq!(page.status, 409);
    assert!(page.text().contains("torpor wake") && !page.text().contains("refresh"));
    assert_eq!(state(&world).await, "asleep");
}

#[tokio::test]
async fn who_finds_nobody_is_told_which_ports_have_a_server() {
    let world = World::with_sandbox().await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let (other, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    let body = visit(&world, &made, "/", &[]).await.expect_error(502, "port_not_listening");
    let listening = body["listening"].as_array().unwrap();
    assert!(!listening.is_empty(), "{body}");
    let many = listening.len() == 20;
    assert!(many || listening.contains(&json!(other)), "{body} lacks {other}");
    let page = visit(&world, &made, "/", &[BROWSER]).await;
    assert_eq!(page.status, 502);
    let first = listening[0].to_string();
    for text in [&format!("port {port}"), &first, "127.0.0.1 is enough"] {
        assert!(page.text().contains(text), "{text} is not in {}", page.text());
    }
}

#[tokio::test]
async fn a_browser_that_would_wait_long_gets_a_page_that_comes_again_while_the_wake_goes_on() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await;
    world.wait("web", "tier", json!("cold")).await;
    world.host.start_takes(Duration::from_secs(5));
    let page = visit(&world, &made, "/", &[BROWSER]).await;
    assert_eq!((page.status.as_u16(), page.header("retry-after")), (503, "1"), "{}", page.text());
    assert!(page.text().contains("http-equiv=\"refresh\""), "{}", page.text());
    // Nobody asks any more, and it wakes all the same.
    world.wait("web", "state", json!("running")).await;
    assert_eq!(visit(&world, &made, "/", &[BROWSER]).await.status, 200);
    assert_eq!(world.host.revives(), 1, "it was woken once");
}
