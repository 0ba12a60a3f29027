//! An image of 300 MB from a registry on this host, beside the transfer of the same bytes; on a daemon of its own.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use tokio::process::Command;
use tokio::time::Instant;
use torpor_client::{Client, Route, body};
use torpor_protocol::api::{PullImage, PushImage};

use crate::Bench;
use crate::error::{Error, Result};
use crate::home::{Home, Reaped, made};
use crate::load::Summary;
use crate::report::{Report, Start};

/// Bytes of the image, which no compression makes less.
const SIZE: usize = 300_000_000;
/// Each is another image: what is here already is not pulled.
const ROUNDS: u32 = 3;
const START_MAX: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(20);
const PROGRAM: &str = "docker-registry";

/// A registry with a directory of its own.
struct Registry {
    address: String,
    storage: PathBuf,
    client: Client,
    _child: Reaped,
}

pub(crate) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    if !Home::possible() {
        return Err(Error::failed("a daemon of its own needs root"));
    }
    let home = Home::make(None)?;
    let registry = Registry::start(&home.data().with_file_name("registry")).await?;
    let daemon = home.serve().await?;
    let (mut pulled, mut raw) = (Vec::new(), Vec::new());
    for round in 0..bench.slow_rounds().min(ROUNDS) {
        let to = format!("{}/bench/big:{round}", registry.address);
        publish(&daemon.client, &to, u64::from(round)).await?;
        let begun = Instant::now();
        let request = PullImage { image: to, ..PullImage::default() };
        made(daemon.client.follow(&Route::new("/v1/images/pull"), &request).await?).await?;
        pulled.push(begun.elapsed());
        let begun = Instant::now();
        registry.read_newest().await?;
        raw.push(begun.elapsed());
    }
    let ratio = Summary::of(&pulled).p50 / Summary::of(&raw).p50;
    report.latency("pull 300 MB", Start::Running, Summary::of(&pulled));
    report.latency("the same bytes alone", Start::Running, Summary::of(&raw));
    report.figure("pull / transfer", ratio, "×");
    daemon.stop().await
}

/// Makes an image, sends it to the registry and forgets it.
async fn publish(client: &Client, to: &str, seed: u64) -> Result<()> {
    let import = Route::new("/v1/images/import").query("name", "big");
    let events = client.lines(Method::POST, &import, body::full(root(seed))).await?;
    let image = made(events).await?;
    let push = PushImage { to: to.to_owned(), image: image.clone(), ..PushImage::default() };
    made(client.follow(&Route::new("/v1/images/push"), &push).await?).await?;
    Ok(client.delete(&Route::new("/v1/images/").then(&image.unwrap_or_default())).await?)
}

/// A tar of one file.
fn root(seed: u64) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let content = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    let content: Vec<u8> = content.take(SIZE / 8).flatten().collect();
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(content.len() as u64);
    let mut tar = tar::Builder::new(Vec::with_capacity(content.len() + 4096));
    tar.append_data(&mut header, "big", &*content).expect("memory takes any bytes");
    tar.into_inner().expect("memory takes any bytes").into()
}

impl Registry {
    async fn start(dir: &Path) -> Result<Self> {
        let local = |error| Error::local("start a registry", error);
        std::fs::create_dir_all(dir).map_err(local)?;
        let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let address = free.map_err(local)?.to_string();
        let storage = dir.join("storage");
        let config = format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {storage:?}}}}}\n\
             http: {{addr: {address:?}}}\n"
        );
        let file = dir.join("config.yml");
        std::fs::write(&file, config).map_err(local)?;
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| {
            Error::local("run docker-registry (the package of the same name has it)", error)
        })?;
        let server = format!("http://{address}").parse().map_err(Error::Failed)?;
        let registry =
            Self { address, storage, client: Client::new(server, None)?, _child: Reaped(child) };
        let deadline = Instant::now() + START_MAX;
        while registry.client.send(Method::GET, &Route::new("/v2/"), body::empty()).await.is_err() {
            if Instant::now() > deadline {
                return Err(Error::failed("docker-registry did not start"));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(registry)
    }

    /// Reads the layer that came last, and nothing else is done with it.
    async fn read_newest(&self) -> Result<()> {
        let blobs = self.storage.join("docker/registry/v2/blobs/sha256");
        let local = |error| Error::local("look into the registry", error);
        let mut newest = None;
        for group in std::fs::read_dir(blobs).map_err(local)?.flatten() {
            for blob in std::fs::read_dir(group.path()).map_err(local)?.flatten() {
                let about = std::fs::metadata(blob.path().join("data")).map_err(local)?;
                let digest = blob.file_name().to_string_lossy().into_owned();
                if about.len() as usize >= SIZE {
                    newest = newest.max(Some((about.modified().map_err(local)?, digest)));
                }
            }
        }
        let (_, digest) = newest.ok_or_else(|| Error::failed("the registry has no layer"))?;
        let route = Route::new(&format!("/v2/bench/big/blobs/sha256:{digest}"));
        let mut body = self.client.send(Method::GET, &route, body::empty()).await?.into_body();
        while let Some(frame) = body.frame().await {
            frame.map_err(|error| Error::garbled("the transfer broke off", error))?;
        }
        Ok(())
    }
}
