//! A registry in the test: it answers what the test says, byte for byte.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use torpor_registry::{
    Client, Credentials, Digest, Login, Patience, Reference, RegistrySettings, Result, Settings,
    architecture,
};

/// What was asked.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Asked {
    /// The first byte that is asked for.
    pub(crate) fn from(&self) -> usize {
        let range = self.headers.get("range").map_or("bytes=0-", String::as_str);
        range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap()
    }

    pub(crate) fn authorization(&self) -> Option<&str> {
        self.headers.get("authorization").map(String::as_str)
    }
}

/// What is answered.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// It says nothing more after that, and stays.
    pub(crate) stall: bool,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), cut: None, stall: false }
    }

    pub(crate) fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self::new(200, body)
    }

    pub(crate) fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// A blob, from where it is asked for.
    pub(crate) fn range(blob: &[u8], asked: &Asked) -> Self {
        match asked.from() {
            0 => Self::ok(blob),
            from => {
                let range = format!("bytes {from}-{}/{}", blob.len() - 1, blob.len());
                Self::new(206, &blob[from..]).header("content-range", range)
            }
        }
    }
}

/// A listener with everything it was asked.
pub(crate) struct Fake {
    pub(crate) host: String,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
}

impl Fake {
    pub(crate) async fn start(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (answer, heard) = (Arc::new(answer), asked.clone());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let (answer, heard) = (answer.clone(), heard.clone());
                tokio::spawn(async move {
                    let Some(asked) = read(&mut stream).await else { return };
                    let reply = answer(&asked);
                    heard.lock().push(asked);
                    let _ = stream.write_all(&encode(&reply)).await;
                    if reply.stall {
                        tokio::time::sleep(Duration::from_secs(60)).await;
                    }
                });
            }
        });
        Self { host, asked }
    }

    pub(crate) fn count(&self, part: &str) -> usize {
        self.asked.lock().iter().filter(|asked| asked.path.contains(part)).count()
    }

    pub(crate) fn reference(&self, rest: &str) -> Reference {
        format!("{}/{rest}", self.host).parse().unwrap()
    }
}

async fn read(stream: &mut tokio::net::TcpStream) -> Option<Asked> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).ok()?;
    let mut lines = head.split("\r\n");
    let mut first = lines.next()?.split(' ');
    let (method, path) = (first.next()?.to_owned(), first.next()?.to_owned());
    let pair = |line: &str| {
        let (name, value) = line.split_once(": ")?;
        Some((name.to_ascii_lowercase(), value.to_owned()))
    };
    let headers: BTreeMap<_, _> = lines.filter_map(pair).collect();
    let length: usize = headers.get("content-length").map_or(0, |n| n.parse().unwrap());
    while bytes.len() < end + 4 + length {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    Some(Asked { method, path, headers, body: bytes[end + 4..].to_vec() })
}

fn encode(reply: &Reply) -> Vec<u8> {
    let mut text =
        format!("HTTP/1.1 {} X\r\ncontent-length: {}\r\n", reply.status, reply.body.len());
    for (name, value) in &reply.headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
    [text.as_bytes(), body].concat()
}

/// One login for one registry.
#[derive(Default, Clone)]
pub(crate) struct Known(pub(crate) Option<(String, Login)>);

#[async_trait]
impl Credentials for Known {
    async fn find(&self, registry: &str) -> Result<Option<Login>> {
        Ok(self.0.clone().filter(|(host, _)| host == registry).map(|(_, login)| login))
    }
}

pub(crate) fn patience() -> Patience {
    Patience {
        stall: Duration::from_millis(100),
        backoff: Duration::from_millis(5),
        retry_after: Duration::from_secs(1),
        ..Patience::default()
    }
}

pub(crate) fn client(known: Known) -> Client {
    let settings = Settings { patience: patience(), ..Settings::default() };
    Client::new(settings, Box::new(known)).unwrap()
}

pub(crate) fn client_with(registry: &str, about: RegistrySettings) -> Client {
    let registries = [(registry.to_owned(), about)].into();
    let settings = Settings { registries, patience: patience() };
    Client::new(settings, Box::new(Known::default())).unwrap()
}

/// An image of one layer, as a registry has it.
#[derive(Clone)]
pub(crate) struct Sample {
    pub(crate) layer: Vec<u8>,
    pub(crate) config: Vec<u8>,
    pub(crate) manifest: Vec<u8>,
    pub(crate) index: Vec<u8>,
}

impl Sample {
    pub(crate) fn new(bytes: usize) -> Self {
        let layer: Vec<u8> = (0..bytes).map(|n| u8::try_from(n % 251).unwrap()).collect();
        let config = br#"{"os":"linux"}"#.to_vec();
        let manifest = json!({
            "schemaVersion": 2,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": Digest::of(&config), "size": config.len(),
            },
            "layers": [{
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": Digest::of(&layer), "size": layer.len(),
            }],
        });
        let manifest = manifest.to_string().into_bytes();
        let entry = |arch: &str, bytes: &[u8]| {
            json!({
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": Digest::of(bytes), "size": bytes.len(),
                "platform": {"os": "linux", "architecture": arch},
            })
        };
        let entries = [entry("s390x", b"no"), entry(architecture(), &manifest)];
        let index = json!({"schemaVersion": 2, "manifests": entries}).to_string().into_bytes();
        Self { layer, config, manifest, index }
    }

    /// An honest answer.
    pub(crate) fn answer(&self, asked: &Asked) -> Reply {
        let blobs = [&self.layer, &self.config, &self.manifest, &self.index];
        if let Some(blob) = blobs.into_iter().find(|b| asked.path.contains(Digest::of(b).as_str()))
        {
            return Reply::range(blob, asked);
        }
        match asked.path.as_str() {
            "/v2/a/b/manifests/latest" => Reply::ok(self.index.clone()),
            _ => Reply::new(404, "{}"),
        }
    }

    pub(crate) fn is_layer(&self, asked: &Asked) -> bool {
        asked.path.contains(Digest::of(&self.layer).as_str())
    }
}
