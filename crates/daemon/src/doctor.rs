//! Whether this host is fit for Torpor, and what to do if not: what the engine needs, the data
//! directory, the port, the default image.

mod engine;
mod production;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use production::production;
use rustix::fs::{Access, access};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torpor_engines::probe::probe;
pub use torpor_engines::probe::{Finding, Verdict};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::DEFAULT_IMAGE;
use torpor_store::{Images, Layout, Ledger};

use crate::config::Config;
use crate::engine::find_runsc;
use crate::{ServeError, bind};
use torpor_lifecycle::chain;

/// How long whoever listens on our port may take to say whether it is us.
const ANSWER: Duration = Duration::from_secs(5);
/// Longest answer that is read.
const ANSWER_MAX: u64 = 64 * 1024;

/// Looks at everything `serve` will need. Takes a few seconds.
pub async fn doctor(config: &Config) -> Vec<Finding> {
    let engines = engine::look(config).await;
    let runsc = find_runsc(config).filter(|_| engines.gvisor);
    let mut findings = probe(runsc.as_deref(), &config.data_dir).await;
    if engines.gvisor && runsc.is_none() {
        let remedy = "install it, or set engine.runsc_path";
        findings.push(failed("runsc", "not found in PATH", remedy));
    }
    findings.extend(engines.findings);
    findings.push(port(config).await.finding(config));
    findings.extend(store(&config.data_dir).await);
    findings
}

/// Whether the port can be had.
enum Port {
    Free,
    /// A daemon of ours answers there.
    Ours,
    Taken(ServeError),
}

async fn port(config: &Config) -> Port {
    match bind(config).await {
        Ok(_) => Port::Free,
        Err(ServeError::PortInUse(_)) if is_torpor(config).await => Port::Ours,
        Err(error) => Port::Taken(error),
    }
}

impl Port {
    fn finding(self, config: &Config) -> Finding {
        let address = config.listen;
        match self {
            Self::Free => fine("port", format!("{address} is free")),
            Self::Ours => fine("port", format!("torpor is running on {address}")),
            Self::Taken(error) => {
                failed("port", chain(&error), "choose another port with --listen or TORPOR_LISTEN")
            }
        }
    }
}

/// Whether what listens there answers as we do.
async fn is_torpor(config: &Config) -> bool {
    let answer = ask(config.listen, "/healthz").await.unwrap_or_default();
    answer.contains("x-request-id") && answer.ends_with("\r\n\r\nok")
}

/// What is answered to somebody without a key, head included.
async fn ask(address: SocketAddr, path: &str) -> Option<String> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.take(ANSWER_MAX).read_to_string(&mut answer).await.ok()?;
        Some(answer)
    };
    tokio::time::timeout(ANSWER, ask).await.ok().flatten()
}

/// Opens the store as `serve` would, unless a daemon has it.
async fn store(data_dir: &Path) -> Vec<Finding> {
    let shown = data_dir.display();
    if let Some(pid) = Layout::user(data_dir) {
        return vec![fine("data directory", format!("the daemon with pid {pid} uses {shown}"))];
    }
    if !data_dir.exists() {
        return vec![absent(data_dir)];
    }
    match open(data_dir).await {
        Ok(images) => {
            let image = match images.resolve(DEFAULT_IMAGE).await {
                Ok(_) => fine("default image", format!("{DEFAULT_IMAGE} is there")),
                Err(error) => {
                    warned("default image", chain(&error), "make it with `torpor image base`")
                }
            };
            vec![fine("data directory", format!("{shown} can be used")), image]
        }
        Err(error) => {
            vec![failed("data directory", chain(&error), "choose another one with --data-dir")]
        }
    }
}

async fn open(data_dir: &Path) -> Result<Images, StoreError> {
    let layout = Arc::new(Layout::open(data_dir)?);
    let ledger = Ledger::open(&layout).await?;
    Images::open(layout, ledger, torpor_engines::AGENT).await
}

fn absent(data_dir: &Path) -> Finding {
    let shown = data_dir.display();
    let parent = data_dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    match access(parent, Access::WRITE_OK) {
        Ok(()) => fine("data directory", format!("{shown} will be made")),
        Err(error) => failed(
            "data directory",
            format!("{shown} can't be made: {error}"),
            "run as root, or choose another one with --data-dir",
        ),
    }
}

fn fine(name: &'static str, detail: impl Into<String>) -> Finding {
    Finding { name, verdict: Verdict::Ok, detail: detail.into(), remedy: None }
}

fn failed(name: &'static str, detail: impl Into<String>, remedy: &str) -> Finding {
    let (detail, remedy) = (detail.into(), Some(remedy.to_owned()));
    Finding { name, verdict: Verdict::Fail, detail, remedy }
}

fn warned(name: &'static str, detail: impl Into<String>, remedy: &str) -> Finding {
    Finding { verdict: Verdict::Warn, ..failed(name, detail, remedy) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn somebody_elses_port_is_a_failure_with_a_remedy() {
        let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = Config { listen: taken.local_addr().unwrap(), ..Config::default() };
        tokio::spawn(async move {
            let (mut stream, _) = taken.accept().await.unwrap();
            let _ = stream.write_all(b"220 mail.example ESMTP\r\n").await;
        });
        let finding = port(&config).await.finding(&config);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.remedy.unwrap().contains("--listen"));
    }

    #[tokio::test]
    async fn a_fresh_data_directory_lacks_only_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let absent = store(&dir.path().join("new")).await;
        assert_eq!(absent[0].verdict, Verdict::Ok);
        assert!(!dir.path().join("new").exists(), "looking must not make it");
        let fresh = store(dir.path()).await;
        let verdicts: Vec<_> = fresh.iter().map(|finding| finding.verdict).collect();
        assert_eq!(verdicts, [Verdict::Ok, Verdict::Warn]);
    }

    #[tokio::test]
    async fn a_directory_in_use_is_fine() {
        let dir = tempfile::tempdir().unwrap();
        let _layout = Layout::open(dir.path()).unwrap();
        let findings = store(dir.path()).await;
        assert_eq!(findings[0].verdict, Verdict::Ok, "{findings:?}");
    }

    #[tokio::test]
    async fn a_directory_of_somebody_else_is_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("thesis"), "x").unwrap();
        let findings = store(dir.path()).await;
        assert_eq!(findings[0].verdict, Verdict::Fail);
    }
}
