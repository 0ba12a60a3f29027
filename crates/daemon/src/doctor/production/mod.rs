//! What matters before strangers' code is let in, besides what makes sandboxes work.
//!
//! Invariants
//! - every check is a function of its arguments: of the files below [`Host::root`], the configuration, or
//!   what was asked for before;
//! - nothing is changed that the ordinary checks leave alone.

mod files;
mod host;
#[cfg(test)]
mod tests;

use std::path::Path;

use torpor_engines::gvisor::build::Build;
use torpor_engines::probe::Finding;
use torpor_store::{Layout, Ledger};

use super::{Port, ask, engine, failed, fine, port, warned};
use crate::config::{Config, DEFAULT_FILE, ListenAlso};
use crate::engine::find_runsc;
use host::Host;

/// What is found in addition to [`super::doctor`]; `file` is where the configuration was read from.
pub async fn production(config: &Config, file: Option<&Path>) -> Vec<Finding> {
    let host = Host::here();
    let mut findings = host.findings();
    findings.push(host.cores(Layout::user(&config.data_dir), &config.runtime_dir));
    findings.push(host.permissions(config, file.unwrap_or(Path::new(DEFAULT_FILE))));
    findings.push(isolation(wall(config).await));
    findings.push(listeners(config));
    findings.push(keys(guarded(config).await));
    findings
}

/// What stands between a sandbox and the host.
enum Wall {
    Gvisor(Build),
    Kvm,
    /// QEMU without KVM.
    Emulation,
    /// The engine does not work, as another finding says.
    None,
}

async fn wall(config: &Config) -> Wall {
    let engines = engine::look(config).await;
    if !engines.gvisor {
        return if engines.kvm { Wall::Kvm } else { Wall::Emulation };
    }
    let Some(runsc) = find_runsc(config) else { return Wall::None };
    Build::of(&runsc).await.map_or(Wall::None, Wall::Gvisor)
}

fn isolation(wall: Wall) -> Finding {
    let name = "isolation";
    let upstream = "install the newest release of gvisor.dev (scripts/setup --runsc upstream)";
    match wall {
        Wall::Gvisor(build) if build.of_a_distribution() => {
            failed(name, format!("{build} is a distribution's build with known holes"), upstream)
        }
        Wall::Gvisor(build) if build.misuses_cuse() => {
            let detail = format!("{build} has CVE-2026-96812, which needs a /dev/cuse on the host");
            let remedy = "install release-20260901 or newer, and never load the cuse module";
            warned(name, detail, remedy)
        }
        Wall::Gvisor(build) => fine(name, format!("gVisor {build}")),
        Wall::Kvm => fine(name, "microVMs with KVM"),
        Wall::Emulation => failed(
            name,
            "microVMs would be emulated, which QEMU does not maintain as a wall against hostile guests",
            "use a host on which KVM works, or engine.kind = gvisor",
        ),
        Wall::None => failed(name, "there is no engine", "see above"),
    }
}

/// Whether keys and data cross a network as they are.
fn listeners(config: &Config) -> Finding {
    // Where clients of dialects look is on loopback.
    let second = match config.listen_also {
        Some(ListenAlso::At(address)) => Some(address),
        Some(ListenAlso::Off) | None => None,
    };
    let plain = [config.listen].into_iter().chain(second);
    let open: Vec<_> = plain.filter(|at| !at.ip().is_loopback()).map(|at| at.to_string()).collect();
    let detail = format!("keys and data are not encrypted on the way to {}", open.join(", "));
    let remedy = "listen on 127.0.0.1 and for others on tls.listen (docs/guide/tls.md), or have a \
                  proxy in front that speaks TLS";
    match (open.is_empty(), config.tls.listen) {
        (true, None) => fine("listeners", "on loopback only"),
        (true, Some(address)) => fine("listeners", format!("others come with TLS to {address}")),
        (false, None) => failed("listeners", detail, remedy),
        (false, Some(address)) => {
            warned("listeners", format!("{detail}, besides TLS at {address}"), remedy)
        }
    }
}

/// Whether the API asks for a key; `None` if that can't be told.
async fn guarded(config: &Config) -> Option<bool> {
    if config.api_key.is_some() {
        return Some(true);
    }
    if let Port::Ours = port(config).await {
        let answer = ask(config.listen, "/v1/info").await?;
        return Some(answer.starts_with("HTTP/1.1 401 "));
    }
    if !config.data_dir.exists() {
        return Some(false);
    }
    let ledger = Ledger::open(&Layout::open(&config.data_dir).ok()?).await.ok()?;
    let keys = ledger.count_keys().await.ok();
    ledger.close().await;
    keys.map(|keys| keys > 0)
}

fn keys(guarded: Option<bool>) -> Finding {
    let remedy = "make one with `torpor key create`, or set TORPOR_API_KEY";
    match guarded {
        Some(true) => fine("API key", "is asked for"),
        Some(false) => {
            failed("API key", "there is none: every user of this host may do everything", remedy)
        }
        None => warned("API key", "whether one is asked for could not be seen", remedy),
    }
}
