//! Who may come: tokens, cookies and keys, and what ends them.

use futures_util::{SinkExt, StreamExt};
use http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::config::Secret;
use torpor_daemon::{Config, ShutdownMode};

use super::{BROWSER, PREVIEWS, asked, cookie, echo, host_of, preview, text, token, visit};
use crate::client::{PATIENCE, open, send, with_json};
use crate::world::World;

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
        token(&world, &made, json!({"ttl_ms": 60_000})).await,
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
        world.restart(ShutdownMode::Running).await;
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

/// A WebSocket through a preview, opened by a token in its URL.
async fn socket(world: &World, preview: &Value, token: &Value) -> WebSocketStream<TcpStream> {
    let stream = TcpStream::connect(world.address).await.unwrap();
    let url = format!("ws://{}/?torpor_preview_token={}", host_of(preview), text(token));
    tokio_tungstenite::client_async(url, stream).await.unwrap().0
}

#[tokio::test]
async fn a_websocket_goes_through_until_its_token_is_revoked() {
    let world = World::with_sandbox().await;
    let (port, _server) = socket_echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let opens = token(&world, &made, json!({})).await;
    let mut socket = socket(&world, &made, &opens).await;
    socket.send(Message::text("hello")).await.unwrap();
    let heard = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap();
    assert_eq!(heard.unwrap().unwrap(), Message::text("hello"));
    let path = format!("{PREVIEWS}/port-{port}/tokens/{}", opens["id"].as_str().unwrap());
    world.delete(&path).await.expect(204);
    let ended = tokio::time::timeout(PATIENCE, socket.next()).await.expect("it is cut off");
    assert!(!matches!(ended, Some(Ok(Message::Text(_)))), "{ended:?}");
}

#[tokio::test]
async fn a_websocket_is_cut_off_when_the_time_of_its_token_is_over() {
    let world = World::with_sandbox().await;
    let (port, _server) = socket_echo().await;
    let made = preview(&world, json!({"port": port})).await;
    let opens = token(&world, &made, json!({"ttl_ms": 1000})).await;
    let mut socket = socket(&world, &made, &opens).await;
    let ended = tokio::time::timeout(PATIENCE, socket.next()).await.expect("it is cut off");
    assert!(!matches!(ended, Some(Ok(_))), "{ended:?}");
    let header = [("x-torpor-preview-token", text(&opens))];
    assert_eq!(visit(&world, &made, "/", &header).await.status, 401);
    let tokens = world.get(&format!("{PREVIEWS}/port-{port}/tokens")).await.expect(200);
    assert_eq!(tokens["tokens"][0]["expired"], true);
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
