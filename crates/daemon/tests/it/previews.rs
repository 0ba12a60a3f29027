//! Previews: found by their label, opened by their tokens, with their rules.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use http::{Method, Request};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::config::{PreviewsConfig, Secret};
use torpor_daemon::{Config, Leave};

use crate::client::{Answer, PATIENCE, open, request, send, with_json};
use crate::world::World;

const PREVIEWS: &str = "/v1/sandboxes/web/previews";
const BROWSER: (&str, &str) = ("accept", "text/html,*/*");

/// A server "inside" that answers with the head it was asked with, as long as this lives; and its port.
async fn echo() -> (u16, AbortOnDropHandle<()>) {
    echo_at("127.0.0.1:0").await
}

async fn echo_at(address: &str) -> (u16, AbortOnDropHandle<()>) {
    let server = TcpListener::bind(address).await.unwrap();
    let port = server.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        loop {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut head = [0; 4096];
            let count = stream.read(&mut head).await.unwrap();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {count}\r\nx-app: own\r\nx-frame-options: DENY\r\n\
                 set-cookie: torpor_preview=forged\r\nset-cookie: own=1\r\n\r\n"
            );
            stream.write_all(&[answer.as_bytes(), &head[..count]].concat()).await.unwrap();
        }
    });
    (port, AbortOnDropHandle::new(serving))
}

/// A preview of `web`.
async fn preview(world: &World, body: Value) -> Value {
    world.post(PREVIEWS, body).await.expect(201)
}

fn host_of(preview: &Value) -> String {
    format!("{}.localhost", preview["label"].as_str().unwrap())
}

fn asked(
    method: Method,
    path: &str,
    host: &str,
    headers: &[(&'static str, &str)],
) -> Request<http_body_util::Full<bytes::Bytes>> {
    let mut asked = request(method, path, "");
    asked.headers_mut().insert("host", host.parse().unwrap());
    for (name, value) in headers {
        asked.headers_mut().insert(*name, value.parse().unwrap());
    }
    asked
}

async fn visit(
    world: &World,
    preview: &Value,
    path: &str,
    headers: &[(&'static str, &str)],
) -> Answer {
    send(world.address, asked(Method::GET, path, &host_of(preview), headers)).await
}

async fn token(world: &World, preview: &Value, body: Value) -> Value {
    let path = format!("{PREVIEWS}/{}/tokens", preview["name"].as_str().unwrap());
    world.post(&path, body).await.expect(201)
}

fn text(token: &Value) -> &str {
    token["token"].as_str().unwrap()
}

/// The cookie that a browser has after it came with a token in the URL.
async fn cookie(world: &World, preview: &Value, token: &str) -> String {
    let path = format!("/page?a=1&torpor_preview_token={token}&b=2");
    let sent_on = visit(world, preview, &path, &[BROWSER]).await;
    assert_eq!(sent_on.status, 302, "{}", sent_on.text());
    assert_eq!(sent_on.header("location"), "/page?a=1&b=2");
    let cookie = sent_on.header("set-cookie").to_owned();
    assert!(cookie.contains("HttpOnly") && !cookie.contains(token), "{cookie}");
    cookie.split(';').next().unwrap().to_owned()
}

async fn sleep(world: &World) {
    world.tell("/v1/sandboxes/web/sleep").await;
    world.wait("web", "state", json!("standby")).await;
}

async fn state(world: &World) -> Value {
    world.get("/v1/sandboxes/web").await.expect(200)["state"].clone()
}

// === Where it is found ===

#[tokio::test]
async fn a_preview_is_found_under_any_name_that_begins_with_its_label() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    assert_eq!(made["name"], format!("port-{port}"));
    let (label, listens) = (made["label"].as_str().unwrap(), world.address.port());
    let urls = [
        format!("http://{label}.localhost:{listens}/"),
        format!("http://{label}.127-0-0-1.sslip.io:{listens}/"),
    ];
    assert_eq!(made["urls"], json!(urls));
    for domain in ["localhost", "127-0-0-1.sslip.io:1", "example.org"] {
        let host = format!("{label}.{domain}");
        let answer = send(world.address, asked(Method::GET, "/page", &host, &[])).await;
        assert_eq!(answer.status, 200, "{domain}");
        assert!(answer.text().contains(&format!("host: {host}")), "{}", answer.text());
    }
    let by_header = asked(Method::GET, "/page", "x", &[("x-torpor-preview", label)]);
    assert_eq!(send(world.address, by_header).await.status, 200);
    let other = asked(Method::GET, "/page", &format!("{label}.local"), &[]);
    assert_eq!(send(world.address, other).await.status, 404);
}

#[tokio::test]
async fn with_a_domain_of_its_own_only_names_below_it_lead_to_previews() {
    let previews = PreviewsConfig { domain: "p.example.org".to_owned() };
    let world = World::with(Config { previews, ..Config::default() }).await;
    world.create(json!({"name": "web"})).await.expect(201);
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true, "prefix": "shop"})).await;
    assert!(made["urls"][0].as_str().unwrap().starts_with("http://shop.p.example.org:"), "{made}");
    for (host, status) in [
        ("shop.p.example.org", 200),
        ("shop.localhost", 200),
        ("shop.10-0-0-1.sslip.io", 200),
        ("shop.example.org", 404),
    ] {
        let answer = send(world.address, asked(Method::GET, "/", host, &[])).await;
        assert_eq!(answer.status, status, "{host}");
    }
}

#[tokio::test]
async fn names_are_unique_in_a_sandbox_and_prefixes_everywhere() {
    let world = World::with_sandbox().await;
    world.create(json!({"name": "other"})).await.expect(201);
    preview(&world, json!({"port": 80, "name": "a", "prefix": "shop"})).await;
    let same_name = world.post(PREVIEWS, json!({"port": 81, "name": "a"})).await;
    same_name.expect_error(409, "already_exists");
    let same_prefix = json!({"port": 81, "name": "a", "prefix": "shop"});
    let answer = world.post("/v1/sandboxes/other/previews", same_prefix).await;
    answer.expect_error(409, "already_exists");
    let other = world.post("/v1/sandboxes/other/previews", json!({"port": 81, "name": "a"})).await;
    other.expect(201);
    for body in [
        json!({"port": 0}),
        json!({"port": 80, "prefix": "www"}),
        json!({"port": 80, "prefix": "3000-web"}),
        json!({"port": 80, "cors": ["example.org"]}),
        json!({"port": 80, "request_headers": {"host": "x"}}),
        json!({"port": 80, "ttl_secs": 0}),
        json!({"port": 80, "ttl_secs": 1, "expires_at": 1}),
        json!({"port": 80, "expires_at": 1}),
        json!({"port": 80, "colour": "red"}),
    ] {
        world.post(PREVIEWS, body).await.expect_error(400, "invalid_request");
    }
    let all = world.get("/v1/previews").await.expect(200);
    assert_eq!(all["previews"].as_array().unwrap().len(), 2);
    assert_eq!(world.get(PREVIEWS).await.expect(200)["previews"][0]["label"], "shop");
}

#[tokio::test]
async fn a_preview_survives_the_daemon_and_the_name_of_its_sandbox_but_not_the_sandbox() {
    let mut world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let opens = token(&world, &made, json!({})).await;
    let header = [("x-torpor-preview-token", text(&opens))];
    world.restart(Leave::Running).await;
    assert_eq!(visit(&world, &made, "/", &header).await.status, 200);
    world.patch("/v1/sandboxes/web", json!({"name": "shop"})).await.expect(200);
    assert_eq!(visit(&world, &made, "/", &header).await.status, 200);
    let fork = world.post("/v1/sandboxes/shop/fork", json!({"name": "copy"})).await;
    assert!(fork.status.is_success(), "{}", fork.text());
    let forked = world.get("/v1/sandboxes/copy/previews").await.expect(200);
    assert_eq!(forked["previews"], json!([]));
    world.delete("/v1/sandboxes/shop").await.expect(204);
    assert_eq!(visit(&world, &made, "/", &header).await.status, 404);
    assert_eq!(world.get("/v1/previews").await.expect(200)["previews"], json!([]));
    world.create(json!({"name": "web"})).await.expect(201);
    world.restart(Leave::Running).await;
    assert_eq!(world.get("/v1/previews").await.expect(200)["previews"], json!([]));
}

#[tokio::test]
async fn a_preview_opens_its_port_whatever_the_sandbox_exposes() {
    let world = World::new().await;
    world.create(json!({"name": "web", "ports": {"exposed": []}})).await.expect(201);
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 200);
    let by_port = asked(Method::GET, "/", &format!("{port}-web.localhost"), &[]);
    assert_eq!(send(world.address, by_port).await.status, 403);
}

#[tokio::test]
async fn a_server_is_reached_at_whatever_address_it_listens_on() {
    let world = World::with_sandbox().await;
    for address in ["127.0.0.1:0", "[::1]:0", "127.0.0.7:0"] {
        let (port, _server) = echo_at(address).await;
        let name = format!("port-{port}");
        let made = preview(&world, json!({"port": port, "public": true, "name": name})).await;
        assert_eq!(visit(&world, &made, "/", &[]).await.status, 200, "{address}");
    }
}

// === Who may come ===

#[tokio::test]
async fn a_private_preview_is_opened_by_header_query_and_cookie_which_the_application_never_sees() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let opens = token(&world, &made, json!({})).await;
    let opens = text(&opens);
    assert!(opens.starts_with("tpv_") && opens.len() == 68, "{opens}");
    visit(&world, &made, "/", &[]).await.expect_error(401, "unauthenticated");
    let wrong = visit(&world, &made, "/", &[("x-torpor-preview-token", "tpv_0")]).await;
    wrong.expect_error(401, "unauthenticated");
    let page = visit(&world, &made, "/", &[BROWSER]).await;
    assert_eq!(page.status, 401);
    assert!(page.text().contains("private") && page.text().contains("<form>"), "{}", page.text());

    let query = format!("/?torpor_preview_token={opens}&x=1");
    let had = cookie(&world, &made, opens).await;
    let cookies = format!("a=1; {had}; b=2");
    for (path, headers) in [
        ("/?x=1", vec![("x-torpor-preview-token", opens)]),
        (query.as_str(), vec![]),
        ("/?x=1", vec![BROWSER, ("cookie", cookies.as_str())]),
    ] {
        let answer = visit(&world, &made, path, &headers).await;
        assert_eq!(answer.status, 200, "{path} {headers:?}: {}", answer.text());
        let seen = answer.text();
        assert!(seen.starts_with("GET /?x=1 HTTP/1.1"), "{seen}");
        assert!(!seen.contains(opens) && !seen.contains("torpor_preview"), "{seen}");
        assert_eq!(seen.contains("a=1; b=2"), headers.len() == 2, "{seen}");
    }
    let post = asked(Method::POST, &query, &host_of(&made), &[BROWSER]);
    assert!(send(world.address, post).await.text().starts_with("POST /?x=1 "));
}

#[tokio::test]
async fn a_public_preview_shows_the_application_nothing_of_ours_either() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port, "public": true})).await;
    let headers = [("x-torpor-preview-token", "t"), ("cookie", "torpor_preview=c"), BROWSER];
    let answer = visit(&world, &made, "/?torpor_preview_token=q", &headers).await;
    assert_eq!(answer.status, 200);
    assert!(!answer.text().contains("torpor_preview"), "{}", answer.text());
    let cookies: Vec<_> = answer.headers.get_all("set-cookie").iter().collect();
    assert_eq!(cookies, ["own=1"], "an application does not set ours");
}

#[tokio::test]
async fn an_api_key_opens_a_private_preview_and_goes_no_further() {
    const KEY: &str = "a-long-enough-key";
    let key = Some(Secret(KEY.to_owned()));
    let world = World::with(Config { api_key: key, ..Config::default() }).await;
    let keyed = async |path: &str, body: Value| {
        let mut asked = with_json(Method::POST, path, &body);
        asked.headers_mut().insert("x-api-key", KEY.parse().unwrap());
        send(world.address, asked).await.expect(201)
    };
    keyed("/v1/sandboxes", json!({"name": "web"})).await;
    let (port, _server) = echo().await;
    let made = keyed(PREVIEWS, json!({"port": port})).await;
    let bearer = format!("Bearer {KEY}");
    for header in [("x-api-key", KEY), ("authorization", bearer.as_str())] {
        let answer = visit(&world, &made, "/", &[header]).await;
        assert_eq!(answer.status, 200);
        assert!(!answer.text().contains(KEY), "{}", answer.text());
    }
    assert_eq!(visit(&world, &made, "/", &[("x-api-key", "wrong")]).await.status, 401);
    let basic = [("authorization", "Basic dXNlcg==")];
    assert_eq!(visit(&world, &made, "/", &basic).await.status, 401);
}

#[tokio::test]
async fn a_revoked_token_opens_nothing_and_neither_do_its_cookies() {
    let mut world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let (opens, other) = (
        token(&world, &made, json!({})).await,
        token(&world, &made, json!({"ttl_secs": 60})).await,
    );
    let had = cookie(&world, &made, text(&opens)).await;
    let tokens = format!("{PREVIEWS}/port-{port}/tokens");
    let listed = world.get(&tokens).await.expect(200);
    assert_eq!(listed["tokens"].as_array().unwrap().len(), 2);
    assert!(!listed.to_string().contains("tpv_"), "{listed}");
    world.delete(&format!("{tokens}/{}", opens["id"].as_str().unwrap())).await.expect(204);
    let header = [("x-torpor-preview-token", text(&opens))];
    for _ in 0..2 {
        assert_eq!(visit(&world, &made, "/", &header).await.status, 401);
        assert_eq!(visit(&world, &made, "/", &[("cookie", &had)]).await.status, 401);
        let header = [("x-torpor-preview-token", text(&other))];
        assert_eq!(visit(&world, &made, "/", &header).await.status, 200);
        world.restart(Leave::Running).await;
    }
    let gone = world.delete(&format!("{tokens}/{}", opens["id"].as_str().unwrap())).await;
    gone.expect_error(404, "not_found");
}

#[tokio::test]
async fn a_cookie_is_for_one_preview_and_not_for_pages_of_another() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let trusting = json!({"port": port, "name": "b", "cors": ["http://friend.example"]});
    let trusting = preview(&world, trusting).await;
    let first = cookie(&world, &made, text(&token(&world, &made, json!({})).await)).await;
    let second = cookie(&world, &trusting, text(&token(&world, &trusting, json!({})).await)).await;
    assert_eq!(visit(&world, &trusting, "/", &[("cookie", &first)]).await.status, 401);
    let own = format!("http://{}", host_of(&made));
    for (preview, cookie, origin, status) in [
        (&made, &first, own.as_str(), 200),
        (&made, &first, "http://evil.localhost", 401),
        (&made, &first, "http://friend.example", 401),
        (&trusting, &second, "http://friend.example", 200),
    ] {
        let headers = [("cookie", cookie.as_str()), ("origin", origin)];
        assert_eq!(visit(&world, preview, "/", &headers).await.status, status, "{origin}");
    }
    let image = [
        ("cookie", first.as_str()),
        ("sec-fetch-site", "same-site"),
        ("sec-fetch-mode", "no-cors"),
    ];
    assert_eq!(visit(&world, &made, "/", &image).await.status, 401);
}

/// A WebSocket server "inside" that says what it hears, and its port.
async fn socket_echo() -> (u16, AbortOnDropHandle<()>) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        loop {
            let (stream, _) = server.accept().await.unwrap();
            let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
            while let Some(Ok(message)) = socket.next().await {
                let _ = socket.send(message).await;
            }
        }
    });
    (port, AbortOnDropHandle::new(serving))
}

#[tokio::test]
async fn a_websocket_goes_through_until_its_token_is_revoked() {
    let world = World::with_sandbox().await;
    let (port, _server) = socket_echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let opens = token(&world, &made, json!({})).await;
    let stream = TcpStream::connect(world.address).await.unwrap();
    let url = format!("ws://{}/?torpor_preview_token={}", host_of(&made), text(&opens));
    let (mut socket, _) = tokio_tungstenite::client_async(url, stream).await.unwrap();
    socket.send(Message::text("hello")).await.unwrap();
    let heard = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap();
    assert_eq!(heard.unwrap().unwrap(), Message::text("hello"));
    let path = format!("{PREVIEWS}/port-{port}/tokens/{}", opens["id"].as_str().unwrap());
    world.delete(&path).await.expect(204);
    let ended = tokio::time::timeout(PATIENCE, socket.next()).await.expect("it is cut off");
    assert!(!matches!(ended, Some(Ok(Message::Text(_)))), "{ended:?}");
}

#[tokio::test]
async fn an_answer_under_way_is_cut_off_when_its_visitor_may_not_stay() {
    let world = World::with_sandbox().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let _serving = AbortOnDropHandle::new(tokio::spawn(async move {
        let (mut stream, _) = server.accept().await.unwrap();
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\n").await.unwrap();
        std::future::pending::<()>().await;
    }));
    let made = preview(&world, json!({"port": port, "public": true})).await;
    let mut events = open(world.address, asked(Method::GET, "/", &host_of(&made), &[])).await;
    assert_eq!(events.line().await.unwrap(), "data: 1");
    world.patch(&format!("{PREVIEWS}/port-{port}"), json!({"public": false})).await.expect(200);
    let rest = tokio::spawn(async move { while events.part().await.is_some() {} });
    assert!(rest.await.is_err(), "it breaks off instead of ending");
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 401);
}

// === Its end ===

#[tokio::test]
async fn a_preview_whose_time_is_over_is_not_found_and_in_nobodys_way() {
    let world = World::with_sandbox().await;
    let (port, _server) = echo().await;
    let short = json!({"port": port, "public": true, "prefix": "shop", "ttl_secs": 1});
    let made = preview(&world, short).await;
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 200);
    let over = async {
        while visit(&world, &made, "/", &[]).await.status == 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, over).await.expect("its time is over");
    visit(&world, &made, "/", &[]).await.expect_error(404, "not_found");
    let page = visit(&world, &made, "/", &[BROWSER]).await;
    assert_eq!(
        (page.status.as_u16(), page.header("content-type")),
        (404, "text/html; charset=utf-8")
    );
    assert_eq!(world.get(PREVIEWS).await.expect(200)["previews"], json!([]));
    preview(&world, json!({"port": port, "public": true, "prefix": "shop"})).await;
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 200);
}

#[tokio::test]
async fn a_preview_is_changed_in_place_and_deleted() {
    let world = World::with_sandbox().await;
    let ((one, _one), (two, _two)) = (echo().await, echo().await);
    let made = preview(&world, json!({"port": one, "name": "a", "ttl_secs": 3600})).await;
    let path = format!("{PREVIEWS}/a");
    let rules = json!({"x-to": "two"});
    let update = json!({"port": two, "public": true, "request_headers": rules, "ttl_secs": 0});
    let changed = world.patch(&path, update).await.expect(200);
    assert_eq!((&changed["id"], &changed["label"]), (&made["id"], &made["label"]));
    assert!(made["expires_at_ms"].is_u64() && changed["expires_at_ms"].is_null(), "{changed}");
    assert!(visit(&world, &made, "/", &[]).await.text().contains("x-to: two"));
    assert_eq!(world.get(&path).await.expect(200), changed);
    world.patch(&path, json!({"prefix": "x"})).await.expect_error(400, "invalid_request");
    world.delete(&path).await.expect(204);
    world.delete(&path).await.expect_error(404, "not_found");
    world.get(&path).await.expect_error(404, "not_found");
    assert_eq!(visit(&world, &made, "/", &[]).await.status, 404);
}

// === Headers and CORS ===

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
    assert_eq!(state(&world).await, "standby");
    let refused = visit(&world, &made, "/", &[ask[0]]).await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.header("access-control-allow-origin"), "https://app.example.com");
    assert_eq!(state(&world).await, "standby", "who may not come wakes nobody");
}

// === Who is there ===

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
    assert_eq!(state(&world).await, "standby");
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
    world.host.start_takes(Duration::from_millis(2500));
    let page = visit(&world, &made, "/", &[BROWSER]).await;
    assert_eq!((page.status.as_u16(), page.header("retry-after")), (503, "1"), "{}", page.text());
    assert!(page.text().contains("http-equiv=\"refresh\""), "{}", page.text());
    // Nobody asks any more, and it wakes all the same.
    world.wait("web", "state", json!("running")).await;
    assert_eq!(visit(&world, &made, "/", &[BROWSER]).await.status, 200);
    assert_eq!(world.host.revives(), 1, "it was woken once");
}
