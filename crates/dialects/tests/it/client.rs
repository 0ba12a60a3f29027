//! A small HTTP client that sends what it is told to the byte: one connection per request, closed
//! when its answer is dropped.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    method: &'static str,
    path: String,
    hosts: Option<Vec<String>>,
    headers: Vec<(String, String)>,
    body: Option<Vec<u8>>,
}

impl Ask {
    pub(crate) fn new(method: &'static str, path: impl Into<String>) -> Self {
        let (headers, body) = (Vec::new(), None);
        Self { method, path: path.into(), hosts: None, headers, body }
    }

    pub(crate) fn json(self, body: &Value) -> Self {
        self.header("content-type", "application/json").raw(body.to_string())
    }

    pub(crate) fn raw(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = Some(body.into());
        self
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// One more `Host`; without any it is the address.
    pub(crate) fn host(mut self, host: &str) -> Self {
        self.hosts.get_or_insert_default().push(host.to_owned());
        self
    }

    fn head(&self, address: SocketAddr) -> String {
        let hosts = self.hosts.clone().unwrap_or_else(|| vec![address.to_string()]);
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        for host in hosts {
            head.push_str(&format!("host: {host}\r\n"));
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if self.body.is_some() || self.method != "GET" {
            let length = self.body.as_ref().map_or(0, Vec::len);
            head.push_str(&format!("content-length: {length}\r\n"));
        }
        head + "connection: close\r\n\r\n"
    }

    /// Sends it and gives back the answer as soon as its head is there.
    pub(crate) async fn open(self, address: SocketAddr) -> Open {
        timeout(PATIENCE, self.sent(address).await.answered()).await.expect("an answer in time")
    }

    pub(crate) async fn send(self, address: SocketAddr) -> Answer {
        self.open(address).await.whole().await
    }

    /// Sends it and does not wait.
    pub(crate) async fn sent(self, address: SocketAddr) -> Sent {
        let mut stream = TcpStream::connect(address).await.expect("the daemon listens");
        stream.write_all(self.head(address).as_bytes()).await.unwrap();
        // Whoever is refused for its size may be hung up on.
        let _ = stream.write_all(self.body.as_deref().unwrap_or_default()).await;
        Sent(BufReader::new(stream))
    }
}

/// A request that was sent. Dropping it hangs up.
pub(crate) struct Sent(BufReader<TcpStream>);

impl Sent {
    pub(crate) async fn answered(self) -> Open {
        let mut stream = self.0;
        let status = line(&mut stream).await.expect("a status line");
        let status = status.split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = Vec::new();
        while let Some(text) = line(&mut stream).await.filter(|text| !text.is_empty()) {
            let (name, value) = text.split_once(':').unwrap();
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let of =
            |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| &**value);
        let left = match (of("transfer-encoding"), of("content-length")) {
            (Some("chunked"), _) => Left::Chunks,
            (_, Some(length)) => Left::Bytes(length.parse().unwrap()),
            _ => Left::Everything,
        };
        Open { status, headers, stream, left, rest: Vec::new() }
    }
}

async fn line(stream: &mut BufReader<TcpStream>) -> Option<String> {
    let mut text = String::new();
    let read = stream.read_line(&mut text).await.unwrap_or(0);
    (read > 0).then(|| text.trim_end_matches(['\r', '\n']).to_owned())
}

/// How the end of a body is known.
enum Left {
    Chunks,
    Bytes(usize),
    Everything,
}

/// An answer whose body is still coming. Dropping it hangs up.
pub(crate) struct Open {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    stream: BufReader<TcpStream>,
    left: Left,
    rest: Vec<u8>,
}

impl Open {
    /// The next part of the body; `None` at its end.
    pub(crate) async fn part(&mut self) -> Option<Vec<u8>> {
        timeout(PATIENCE, self.next_part()).await.expect("the body goes on")
    }

    async fn next_part(&mut self) -> Option<Vec<u8>> {
        match &mut self.left {
            Left::Chunks => {
                let size = usize::from_str_radix(&line(&mut self.stream).await?, 16).unwrap();
                let mut part = vec![0; size];
                self.stream.read_exact(&mut part).await.unwrap();
                line(&mut self.stream).await;
                (size > 0).then_some(part)
            }
            Left::Bytes(left) => {
                let mut part = vec![0; std::mem::take(left)];
                self.stream.read_exact(&mut part).await.unwrap();
                (!part.is_empty()).then_some(part)
            }
            Left::Everything => {
                let mut part = Vec::new();
                self.stream.read_to_end(&mut part).await.unwrap_or(0);
                (!part.is_empty()).then_some(part)
            }
        }
    }

    pub(crate) async fn whole(mut self) -> Answer {
        let mut body = std::mem::take(&mut self.rest);
        while let Some(part) = self.part().await {
            body.extend(part);
        }
        Answer { status: self.status, headers: self.headers, body }
    }
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {:?}", self.status, self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(key, _)| key == name);
        found.map_or("", |(_, value)| value)
    }

    /// The body, if it has this status.
    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        if self.body.is_empty() { Value::Null } else { self.json() }
    }

    /// The text of an error, if it is this one and in the form that all of them have.
    #[track_caller]
    pub(crate) fn expect_error(self, status: u16, code: &str) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), "application/json");
        let body = self.json();
        assert_eq!(body["code"], code, "{body}");
        let error = body["error"].as_str().unwrap_or_else(|| panic!("{body}"));
        assert!(!error.is_empty(), "{body}");
        error.to_owned()
    }
}
