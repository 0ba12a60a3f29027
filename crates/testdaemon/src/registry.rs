//! For tests: a registry in this process. It keeps what is pushed, gives out what it has, and waits with
//! layers while the test wants it to.

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::Response;
use parking_lot::Mutex;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::Config;

/// Largest body.
const BODY_MAX: usize = 64 * 1024 * 1024;
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

pub struct FakeRegistry {
    /// Where it listens.
    pub host: String,
    shared: Arc<Shared>,
    _serving: AbortOnDropHandle<()>,
}

struct Shared {
    blobs: Mutex<HashMap<String, Bytes>>,
    /// By repository and tag, or digest.
    manifests: Mutex<HashMap<String, Bytes>>,
    /// Whether layers are given out and taken.
    open: watch::Sender<bool>,
    /// Layers that wait for that.
    waiting: AtomicUsize,
}

impl FakeRegistry {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let host = listener.local_addr().expect("an address").to_string();
        let shared = Arc::new(Shared {
            blobs: Mutex::default(),
            manifests: Mutex::default(),
            open: watch::Sender::new(true),
            waiting: AtomicUsize::new(0),
        });
        let app = Router::new()
            .fallback(answer)
            .layer(DefaultBodyLimit::max(BODY_MAX))
            .with_state(Arc::clone(&shared));
        let serving = tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        });
        Self { host, shared, _serving: AbortOnDropHandle::new(serving) }
    }

    /// A configuration that looks for images here.
    pub fn config(&self) -> Config {
        let mut config = Config::default();
        config.registries.insert(self.host.clone(), Default::default());
        config
    }

    /// `HOST/REST`
    pub fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.host)
    }

    /// Layers wait until they are let through.
    pub fn close(&self) {
        self.shared.open.send_replace(false);
    }

    pub fn open(&self) {
        self.shared.open.send_replace(true);
    }

    /// How many layers wait now.
    pub fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::SeqCst)
    }

    /// An image of one layer with these files.
    pub fn publish(&self, repository: &str, tag: &str, files: &[(&str, &str)]) {
        let mut tar = tar::Builder::new(Vec::new());
        for (path, text) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            tar.append_data(&mut header, path, text.as_bytes()).expect("a file");
        }
        let tar = tar.into_inner().expect("a tar");
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&tar).expect("a layer");
        let layer = gzip.finish().expect("a layer");
        let diffs = [sha256(&tar)];
        let config = json!({"os": "linux", "rootfs": {"type": "layers", "diff_ids": diffs}});
        let config = config.to_string().into_bytes();
        let about = |kind: &str, bytes: &[u8]| {
            let media_type = format!("application/vnd.oci.image.{kind}");
            json!({"mediaType": media_type, "digest": sha256(bytes), "size": bytes.len()})
        };
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": about("config.v1+json", &config),
            "layers": [about("layer.v1.tar+gzip", &layer)],
        });
        for blob in [layer, config] {
            self.shared.blobs.lock().insert(sha256(&blob), blob.into());
        }
        self.shared.keep(repository, tag, manifest.to_string().into());
    }

    /// Says of the layers of what was published that they have so many bytes.
    pub fn claim(&self, repository: &str, tag: &str, bytes: u64) {
        let found = self.shared.manifests.lock().get(&format!("{repository}/{tag}")).cloned();
        let manifest = found.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let mut manifest: serde_json::Value = manifest.expect("it was published");
        manifest["layers"][0]["size"] = json!(bytes);
        self.shared.keep(repository, tag, manifest.to_string().into());
    }
}

impl Shared {
    fn keep(&self, repository: &str, target: &str, manifest: Bytes) {
        let mut manifests = self.manifests.lock();
        manifests.insert(format!("{repository}/{}", sha256(&manifest)), manifest.clone());
        manifests.insert(format!("{repository}/{target}"), manifest);
    }

    /// Returns when layers are let through. Whoever goes away before does not wait any more.
    async fn turn(&self) {
        struct Waiting<'a>(&'a AtomicUsize);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let _waiting = Waiting(&self.waiting);
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let path = head.uri.path().strip_prefix("/v2/").unwrap_or_default().to_owned();
    let query = head.uri.query().unwrap_or_default().replace("%3A", ":");
    if let Some((repository, target)) = path.split_once("/manifests/") {
        if head.method == Method::PUT {
            let bytes = axum::body::to_bytes(body, BODY_MAX).await.unwrap_or_default();
            shared.keep(repository, target, bytes);
            return plain(StatusCode::CREATED);
        }
        let found = shared.manifests.lock().get(&format!("{repository}/{target}")).cloned();
        return found.map_or_else(|| plain(StatusCode::NOT_FOUND), |bytes| of(bytes, MANIFEST));
    }
    if path.ends_with("/blobs/uploads/") {
        let mut answer = plain(StatusCode::ACCEPTED);
        let place = format!("/v2/{path}1").parse().expect("a place");
        answer.headers_mut().insert(header::LOCATION, place);
        return answer;
    }
    if let Some(digest) = query.strip_prefix("digest=").filter(|_| head.method == Method::PUT) {
        let bytes = axum::body::to_bytes(body, BODY_MAX).await.unwrap_or_default();
        shared.turn().await;
        shared.blobs.lock().insert(digest.to_owned(), bytes);
        return plain(StatusCode::CREATED);
    }
    let digest = path.rsplit('/').next().unwrap_or_default();
    let Some(bytes) = shared.blobs.lock().get(digest).cloned() else {
        return plain(StatusCode::NOT_FOUND);
    };
    if head.method == Method::GET && bytes.first() == Some(&0x1f) {
        shared.turn().await;
    }
    of(bytes, "application/octet-stream")
}

fn plain(status: StatusCode) -> Response {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = status;
    answer
}

fn of(bytes: Bytes, media_type: &'static str) -> Response {
    let mut answer = Response::new(Body::from(bytes));
    let media_type = media_type.parse().expect("a type");
    answer.headers_mut().insert(header::CONTENT_TYPE, media_type);
    answer
}

fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}
