//! Requests that two parsers read in two ways, and requests without end. The daemon has a key, and a sandbox a server
//! that writes down what it is asked.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use torpor_e2e::{World, raw};

use super::client::{KEY, keyed};
use super::{Attempt, all_hold, daemon_is_well, memory_of_daemon};

/// A daemon that says nothing for so long waits for more.
const SILENCE: Duration = Duration::from_millis(700);
const PREVIEW: &str = "Host: 3000-web.localhost\r\n";
/// The request that must not come out of another's body.
const HIDDEN: &str = "GET /smuggled HTTP/1.1\r\nHost: 3000-web.localhost\r\n\r\n";

pub(super) const ATTEMPTS: &[Attempt<World>] = &[
    ("smuggle with Content-Length and Transfer-Encoding", both_lengths),
    ("smuggle with two lengths, or one that is no number", odd_lengths),
    ("smuggle with a disguised Transfer-Encoding", odd_codings),
    ("smuggle with folded header lines", folded_lines),
    ("smuggle with bare line feeds and carriage returns", bare_line_ends),
    ("smuggle with sizes of chunks", odd_chunks),
    ("smuggle in the body of a GET", a_body_of_a_get),
    ("split the request by its header values", header_injection),
    ("upgrade a preview to HTTP/2", an_upgrade),
    ("write a path so that others read another one", odd_paths),
    ("write the target in absolute form", absolute_targets),
    ("name the host in odd ways", odd_hosts),
    ("speak no HTTP at all", no_http),
    ("send a header line of a megabyte", a_long_line),
    ("send ten thousand headers", many_headers),
    ("reset HTTP/2 streams as fast as they open", rapid_reset),
    ("continue HTTP/2 headers without end", continuation_flood),
    ("bomb HTTP/2 header compression", header_bomb),
];

/// What comes back for a preview's request with a head of our choice, a body and the hidden request after it.
fn answers(world: &World, head: &str, body: &str) -> String {
    let bytes = format!(
        "POST / HTTP/1.1\r\n{PREVIEW}Authorization: Bearer {KEY}\r\n{head}\r\n{body}{HIDDEN}"
    );
    String::from_utf8_lossy(&raw(world.address(), bytes.as_bytes(), SILENCE)).into_owned()
}

/// The server inside does not see the hidden request as one of its own.
#[track_caller]
fn hides(world: &World, head: &str, body: &str) -> String {
    let answer = answers(world, head, body);
    assert!(!answer.contains("\nGET /smuggled"), "{head:?} {body:?}: {answer}");
    answer
}

/// The same, refused as a whole: the connection ends, because nobody knows where the next request begins.
#[track_caller]
fn refuses(world: &World, head: &str, body: &str) {
    let answer = hides(world, head, body);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{head:?}: {answer}");
    assert_eq!(answer.matches("HTTP/1.1 ").count().max(1), 1, "{head:?}: {answer}");
}

fn both_lengths(world: &World) {
    for (length, body) in [("5", "0\r\n\r\n"), ("4", "5c\r\n"), ("0", "0\r\n\r\n")] {
        for head in [
            format!("Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n"),
            format!("Transfer-Encoding: chunked\r\nContent-Length: {length}\r\n"),
        ] {
            // Read by its chunks or refused, and in either case the last of its connection.
            let answer = answers(world, &head, body);
            assert!(answer.matches("HTTP/1.1 ").count() <= 1, "{head:?}: {answer}");
        }
    }
}

fn odd_lengths(world: &World) {
    for lengths in [
        "Content-Length: 0\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 0\r\n",
        "Content-Length: 0, 5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: 5e0\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: 18446744073709551621\r\n",
        "Content-Length:\r\n",
        "Content-Length : 5\r\n",
        "Content-Length: 5 5\r\n",
    ] {
        refuses(world, lengths, "12345");
    }
}

fn odd_codings(world: &World) {
    for coding in [
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding: identity, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: \"chunked\"\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding:\u{b}chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n",
        "Transfer-Encoding\0: chunked\r\n",
    ] {
        refuses(world, coding, "0\r\n\r\n");
    }
}

fn folded_lines(world: &World) {
    for lines in [
        "Transfer-Encoding:\r\n chunked\r\n",
        "X: 1\r\n Content-Length: 5\r\n",
        "X: 1\r\n\tTransfer-Encoding: chunked\r\n",
        " Content-Length: 5\r\n",
    ] {
        refuses(world, lines, "0\r\n\r\n");
    }
}

fn bare_line_ends(world: &World) {
    for head in
        ["X: 1\rContent-Length: 5\r\n", "X: 1\n\rTransfer-Encoding: chunked\r\n", "X: a\0b\r\n"]
    {
        refuses(world, head, "0\r\n\r\n");
    }
    // What is understood is passed on as it was understood.
    let lines = format!(
        "GET / HTTP/1.1\nHost: 3000-web.localhost\nAuthorization: Bearer {KEY}\nConnection: close\n\n"
    );
    let answer = raw(world.address(), lines.as_bytes(), SILENCE);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.matches("HTTP/1.1 ").count() <= 1, "{answer}");
}

fn odd_chunks(world: &World) {
    let long = format!("5;{}\r\nhello\r\n0\r\n\r\n", "x".repeat(100_000));
    for body in [
        "FFFFFFFFFFFFFFFFF\r\n",
        "-1\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        " 5\r\nhello\r\n0\r\n\r\n",
        "5\r\nhelloX\r\n0\r\n\r\n",
        "5 \n\r\n",
        "\r\n\r\n",
        "5\nhello\n0\n\n",
        &long,
    ] {
        hides(world, "Transfer-Encoding: chunked\r\n", body);
    }
    daemon_is_well(world);
}

fn a_body_of_a_get(world: &World) {
    let bytes = format!(
        "GET / HTTP/1.1\r\nHost: 3000-web.localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {}\r\n\r\n{HIDDEN}",
        HIDDEN.len()
    );
    let answer =
        String::from_utf8_lossy(&raw(world.address(), bytes.as_bytes(), SILENCE)).into_owned();
    assert_eq!(answer.matches("HTTP/1.1 200").count(), 1, "{answer}");
}

fn header_injection(world: &World) {
    for target in
        ["/%0d%0aX-Injected:%201", "/?a=%0d%0aX-Injected:%201", "/a\tX-Injected:1", "/\u{1b}[2J"]
    {
        let bytes = format!(
            "GET {target} HTTP/1.1\r\nHost: 3000-web.localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
        );
        let answer = raw(world.address(), bytes.as_bytes(), SILENCE);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(!answer.contains("\nX-Injected"), "{answer}");
    }
}

fn an_upgrade(world: &World) {
    let head = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Length: 0\r\n";
    let request = format!("GET / HTTP/1.1\r\n{PREVIEW}Authorization: Bearer {KEY}\r\n{head}\r\n");
    let answer = raw(world.address(), request.as_bytes(), SILENCE);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(!answer.contains("HTTP/1.1 101"), "{answer}");
    assert!(!answer.to_lowercase().contains("upgrade: h2c"), "the guest saw it: {answer}");
}

/// A request line as it is, without a key, gets nothing of the API.
#[track_caller]
fn gets_nothing(world: &World, line: &str, host: &str) {
    let bytes = format!("{line} HTTP/1.1\r\n{host}Connection: close\r\n\r\n");
    let answer =
        String::from_utf8_lossy(&raw(world.address(), bytes.as_bytes(), SILENCE)).into_owned();
    let refused =
        answer.is_empty() || answer.starts_with("HTTP/1.1 4") || answer.starts_with("HTTP/1.1 505");
    assert!(refused, "{line} {host}: {answer}");
    assert!(!answer.contains("\"sandboxes\""), "{line} {host}: {answer}");
}

fn odd_paths(world: &World) {
    for path in [
        "//v1/sandboxes",
        "/v1//sandboxes",
        "/./v1/sandboxes",
        "/v1/../v1/sandboxes",
        "/healthz/../v1/sandboxes",
        "/healthz/%2e%2e/v1/sandboxes",
        "/healthz%2f..%2fv1%2fsandboxes",
        "/healthz\\..\\v1\\sandboxes",
        "/v1/sandboxes/",
        "/v1/sandboxes%00",
        "/v1/sandboxes;.js",
        "/v1/sandboxes/.",
        "/V1/SANDBOXES",
        "/%76%31/sandboxes",
        "*",
        "v1/sandboxes",
        "/openapi.json/../v1/sandboxes",
        "/v1/sandboxes#",
        "/v1/%E0%80%AE%E0%80%AE/sandboxes",
    ] {
        gets_nothing(world, &format!("GET {path}"), "Host: localhost\r\n");
    }
}

fn absolute_targets(world: &World) {
    let api = world.address();
    for line in [
        format!("GET http://{api}/v1/sandboxes"),
        format!("GET https://{api}/v1/sandboxes"),
        format!("GET http://user:{KEY}@{api}/v1/sandboxes"),
        "GET http://169.254.169.254/latest/meta-data".to_owned(),
        format!("CONNECT {api}"),
        "CONNECT 169.254.169.254:80".to_owned(),
        "GET file:///etc/passwd".to_owned(),
        "GET gopher://x/v1/sandboxes".to_owned(),
    ] {
        gets_nothing(world, &line, "");
        gets_nothing(world, &line, "Host: localhost\r\n");
    }
}

fn odd_hosts(world: &World) {
    for host in [
        "",
        "Host:\r\n",
        "Host: localhost\r\nHost: web.local\r\n",
        "Host: 3000-web.localhost\r\nHost: localhost\r\n",
        "Host: localhost@3000-web.localhost\r\n",
        "Host: localhost:99999\r\n",
        "Host: localhost/../x\r\n",
        "Host: [::1\r\n",
        "Host: 127.0.0.1.\r\n",
        "Host: localhost, web.local\r\n",
        "Host: \u{1b}[2J\r\n",
    ] {
        gets_nothing(world, "GET /v1/sandboxes", host);
    }
}

fn no_http(world: &World) {
    let hello: Vec<u8> =
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), vec![7; 500]].concat();
    let dots = vec![b'.'; 100_000];
    for bytes in [
        &b"GET /v1/sandboxes\r\n"[..],
        b"GET /v1/sandboxes HTTP/9.9\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"EHLO x\r\nMAIL FROM:<x>\r\n",
        &hello,
        &dots,
        b"\r\n\r\n\r\n\r\n",
    ] {
        let answer = raw(world.address(), bytes, SILENCE);
        assert!(!String::from_utf8_lossy(&answer).contains("\"sandboxes\""), "{answer:?}");
    }
    daemon_is_well(world);
}

/// Sends a head that is too long: it is cut off or refused, and not kept.
#[track_caller]
fn too_long(world: &World, lines: &str) {
    let before = memory_of_daemon(world);
    let bytes = format!("GET /healthz HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n");
    let answer = raw(world.address(), bytes.as_bytes(), SILENCE);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes of the daemon");
}

fn a_long_line(world: &World) {
    too_long(world, &format!("X: {}\r\n", "x".repeat(1 << 20)));
    too_long(world, &format!("{}: x\r\n", "x".repeat(1 << 20)));
    let bytes = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "x".repeat(1 << 20));
    let answer = raw(world.address(), bytes.as_bytes(), SILENCE);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{answer:?}");
}

fn many_headers(world: &World) {
    too_long(world, &(0..10_000).map(|n| format!("X-{n}: {n}\r\n")).collect::<String>());
    too_long(world, &"Cookie: a=b\r\n".repeat(10_000));
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// `GET /healthz`, compressed by the book.
fn get() -> Vec<u8> {
    [&b"\x82\x86\x44\x08/healthz\x41\x09localhost"[..]].concat()
}

/// Says these frames after a greeting, for as long as the daemon listens; it uses little memory meanwhile, and is well.
#[track_caller]
fn floods(world: &World, frames: impl Iterator<Item = Vec<u8>>) {
    let before = memory_of_daemon(world);
    let mut socket = TcpStream::connect(world.address()).unwrap();
    socket.set_write_timeout(Some(SILENCE)).unwrap();
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    socket.write_all(&frame(4, 0, 0, b"")).unwrap();
    for frame in frames {
        if socket.write_all(&frame).is_err() {
            break;
        }
    }
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes of the daemon");
    let _ = socket.read(&mut [0; 1000]);
    daemon_is_well(world);
}

fn rapid_reset(world: &World) {
    let pair =
        |n: u32| [frame(1, 5, 2 * n + 1, &get()), frame(3, 0, 2 * n + 1, &[0, 0, 0, 8])].concat();
    floods(world, (0..50_000).map(pair));
}

fn continuation_flood(world: &World) {
    // Each frame brings a header of 16 kilobytes, and none is the last.
    let piece = [&b"\x00\x01x\x7f\x81\x7c"[..], &[b'x'; 16_000]].concat();
    let first = frame(1, 1, 1, &get());
    floods(world, std::iter::once(first).chain((0..4000).map(move |_| frame(9, 0, 1, &piece))));
}

fn header_bomb(world: &World) {
    // One entry of 4 KB in the table, then named thousands of times in each request.
    let entry = [&b"\x40\x01x\x7f\x81\x1e"[..], &[b'x'; 3968]].concat();
    let head = [get(), entry].concat();
    let first = frame(1, 5, 1, &head);
    let bomb = |n: u32| frame(1, 5, 2 * n + 3, &[get(), vec![0xbe; 16_000]].concat());
    floods(world, std::iter::once(first).chain((0..200).map(bomb)));
}

#[test]
fn strange_requests_are_refused_or_read_in_one_way() {
    let world = keyed(KEY);
    all_hold(&world, ATTEMPTS);
    let seen = world.sh("web", "cat /tmp/seen").stdout;
    assert!(!seen.contains("\n--\nGET /smuggled"), "{seen}");
}
