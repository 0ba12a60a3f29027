//! What sandboxes and the daemon use of their host.

use std::fs;
use std::path::Path;
use std::time::Duration;

use torpor_client::{Client, Route};
use torpor_protocol::SandboxId;
use torpor_protocol::snapshot::{SandboxUsage, UsageList};

use crate::error::Result;

/// State of a listening socket in `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// Processor time and memory of these sandboxes.
pub(crate) async fn usage(client: &Client, ids: &[SandboxId]) -> Result<Vec<SandboxUsage>> {
    let list: UsageList = client.list(&Route::new("/v1/usage")).await?;
    Ok(list.sandboxes.into_iter().filter(|usage| ids.contains(&usage.id)).collect())
}

/// Memory of one, in megabytes: the mean of these.
pub(crate) async fn memory_of(client: &Client, ids: &[SandboxId]) -> Result<f64> {
    let usage = usage(client, ids).await?;
    let bytes: u64 = usage.iter().map(|usage| usage.memory_bytes).sum();
    Ok(megabytes(bytes / u64::try_from(usage.len().max(1)).unwrap_or(1)))
}

pub(crate) fn count(number: usize) -> f64 {
    u32::try_from(number).map_or(f64::INFINITY, f64::from)
}

#[expect(clippy::cast_precision_loss, reason = "megabytes for people")]
pub(crate) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// Processes of this host whose cost counts as the daemon's.
#[derive(Debug)]
pub(crate) struct Processes(Vec<u32>);

impl Processes {
    /// The daemon that listens at this address, and the keeper of its installation; none if the
    /// daemon is elsewhere.
    pub(crate) fn of_daemon(server: &str, installation: &str) -> Option<Self> {
        let address = server.strip_prefix("http://")?.split('/').next()?;
        let (host, port) = address.rsplit_once(':')?;
        let local = ["127.0.0.1", "localhost", "[::1]"].contains(&host);
        let inode = local.then(|| listener(port.parse().ok()?)).flatten()?;
        let daemon = pids().find(|pid| holds(*pid, &inode))?;
        let keepers = pids().filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("keeper") && line.contains(installation)
        });
        Some(Self(std::iter::once(daemon).chain(keepers).collect()))
    }

    pub(crate) fn one(pid: u32) -> Self {
        Self(vec![pid])
    }

    /// Processor time so far.
    pub(crate) fn cpu(&self) -> Duration {
        let ticks: u64 = self.0.iter().filter_map(|pid| ticks(*pid)).sum();
        let micros = ticks.saturating_mul(1_000_000) / rustix::param::clock_ticks_per_second();
        Duration::from_micros(micros)
    }

    /// Resident memory, in megabytes.
    pub(crate) fn memory(&self) -> f64 {
        megabytes(self.0.iter().filter_map(|pid| resident(*pid)).sum())
    }
}

fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The inode of the socket that listens on this port.
fn listener(port: u16) -> Option<String> {
    let end = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|path| {
        let text = fs::read_to_string(path).ok()?;
        text.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let listens = words.get(1)?.ends_with(&end) && *words.get(3)? == LISTENING;
            if listens { words.get(9).map(|inode| (*inode).to_owned()) } else { None }
        })
    })
}

fn holds(pid: u32, inode: &str) -> bool {
    let link = format!("socket:[{inode}]");
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|to| to == Path::new(&link))
}

/// User and system time, fields 14 and 15, counted after the name, which may contain anything.
fn ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let field = |number: usize| rest.split_whitespace().nth(number)?.parse::<u64>().ok();
    Some(field(11)? + field(12)?)
}

fn resident(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_on_a_port_is_found() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let server = format!("http://{}", socket.local_addr().unwrap());
        let found = Processes::of_daemon(&server, "no-installation").unwrap();
        assert_eq!(found.0, [std::process::id()]);
        assert!(found.memory() > 1.0);
        drop(socket);
        assert!(Processes::of_daemon(&server, "no-installation").is_none());
        assert!(Processes::of_daemon("http://example.org:8900", "x").is_none());
    }
}
