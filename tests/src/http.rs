//! One HTTP request over a plain socket: enough for tests, and able to be rude.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// A header, by its name in small letters.
    pub fn header(&self, name: &str) -> Option<String> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .filter(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.to_owned())
            .next()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends a request and reads until the daemon closes. `head` is extra header lines, each with CRLF.
pub fn request(address: &str, method: &str, path: &str, head: &str, body: &[u8]) -> Answer {
    let mut socket = TcpStream::connect(address).expect("the daemon listens");
    socket.set_read_timeout(Some(crate::PATIENCE)).expect("a socket has timeouts");
    let host = if head.to_ascii_lowercase().contains("host:") {
        String::new()
    } else {
        format!("host: {address}\r\n")
    };
    let request = format!(
        "{method} {path} HTTP/1.1\r\n{host}connection: close\r\ncontent-length: {}\r\n{head}\r\n",
        body.len()
    );
    socket.write_all(request.as_bytes()).expect("the daemon reads the head");
    // A daemon that answers early need not read the rest.
    let _ = socket.write_all(body);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    parse(&answer)
}

/// Sends bytes as they are and reads until the daemon closes or is silent for `patience`. It may close before
/// all is sent.
pub fn raw(address: &str, bytes: &[u8], patience: Duration) -> Vec<u8> {
    let mut socket = TcpStream::connect(address).expect("the daemon listens");
    socket.set_read_timeout(Some(patience)).expect("a socket has timeouts");
    socket.set_write_timeout(Some(patience)).expect("a socket has timeouts");
    let _ = socket.write_all(bytes);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    answer
}

fn parse(answer: &[u8]) -> Answer {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(answer)));
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line");
    let body = &answer[end + 4..];
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { dechunk(body) } else { body.to_vec() };
    Answer { status, head, body }
}

fn dechunk(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(line) = rest.windows(2).position(|window| window == b"\r\n") {
        let size = String::from_utf8_lossy(&rest[..line]).into_owned();
        let size = usize::from_str_radix(size.trim(), 16).expect("a chunk size");
        rest = &rest[line + 2..];
        if size == 0 || rest.len() < size {
            break;
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
    body
}
