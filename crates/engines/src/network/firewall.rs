//! Hands scripts to `nft`: each is one transaction, all of it or nothing.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

use super::NetworkError;

/// A script takes some ten milliseconds.
const DEADLINE: Duration = Duration::from_secs(20);
/// Of what nft complains about, for people.
const COMPLAINT_BYTES: usize = 2_000;

pub(super) async fn apply(script: &str) -> Result<(), NetworkError> {
    let failed = NetworkError::host("run nft");
    match timeout(DEADLINE, run(script)).await {
        Ok(done) => {
            let (success, complaint) = done.map_err(failed)?;
            if success { Ok(()) } else { Err(NetworkError::Rules(complaint)) }
        }
        Err(_) => Err(failed(std::io::ErrorKind::TimedOut.into())),
    }
}

async fn run(script: &str) -> std::io::Result<(bool, String)> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .env("PATH", crate::program::search_path())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(script.as_bytes()).await?;
    }
    let output = child.wait_with_output().await?;
    let complaint = &output.stderr[..output.stderr.len().min(COMPLAINT_BYTES)];
    Ok((output.status.success(), String::from_utf8_lossy(complaint).trim().to_owned()))
}
