//! Where Debian's packages come from: the archives that this host's own apt is configured to use.
//!
//! Archives of anybody but Debian are left out, whatever else the host installs from. No archive is
//! named here.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use torpor_lifecycle::store::StoreError;

use crate::images::erofs::{complaint, tool_missing};

/// How long apt may think about its configuration.
const APT_DEADLINE: Duration = Duration::from_secs(60);
/// The key of the Debian archive, on the host and in every Debian tree.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// What apt is asked about each of its package lists.
const FORMAT: &str = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(CODENAME)|$(ORIGIN)|$(LABEL)";
/// Settings of this host that decide whether its archives can be reached and believed.
const SETTINGS: [&str; 3] =
    ["Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Check-Valid-Until"];

/// The Debian that this host is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Debian {
    pub(super) codename: String,
    /// Lines for `sources.list`.
    pub(super) lines: Vec<String>,
    /// Options for apt.
    pub(super) options: Vec<String>,
}

pub(super) async fn debian() -> Result<Debian, StoreError> {
    let release = tokio::fs::read_to_string("/etc/os-release").await.unwrap_or_default();
    let codename = codename(&release).ok_or_else(|| {
        StoreError::Invalid(
            "the default image is built on Debian hosts only: import an image instead".to_owned(),
        )
    })?;
    let lists =
        apt("apt-get", &["indextargets", "--format", FORMAT, "Created-By: Packages"]).await?;
    let lines = lines(&lists, &codename);
    if lines.is_empty() {
        return Err(StoreError::Invalid(format!(
            "apt of this host knows no Debian archive for {codename}: run apt-get update"
        )));
    }
    let options = options(&apt("apt-config", &["dump"]).await?);
    Ok(Debian { codename, lines, options })
}

async fn apt(tool: &'static str, arguments: &[&str]) -> Result<String, StoreError> {
    let mut command = Command::new(tool);
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    let late = |_| StoreError::failed(format!("ask {tool}"))("it did not answer");
    let output = tokio::time::timeout(APT_DEADLINE, command.output()).await.map_err(late)?;
    let output = output.map_err(tool_missing(tool))?;
    if !output.status.success() {
        let said = complaint(&output.stderr);
        return Err(StoreError::failed(format!("ask {tool}"))(said));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn codename(release: &str) -> Option<String> {
    let field = |name: &str| {
        let line = release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        Some(line.trim_matches('"').to_owned())
    };
    field("ID").filter(|id| id == "debian")?;
    let codename = field("VERSION_CODENAME")?;
    let plain = codename.bytes().all(|b| b.is_ascii_lowercase());
    (plain && !codename.is_empty()).then_some(codename)
}

/// The release itself, its updates and its security updates; each archive once.
fn lines(lists: &str, codename: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for list in lists.lines() {
        let fields: Vec<&str> = list.split('|').collect();
        let [uri, release, "main", of, "Debian", "Debian" | "Debian-Security"] = fields.as_slice()
        else {
            continue;
        };
        let part = of.strip_prefix(codename);
        if !matches!(part, Some("" | "-updates" | "-security")) {
            continue;
        }
        let line = format!("deb [signed-by={KEYRING}] {uri} {release} main");
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

fn options(dump: &str) -> Vec<String> {
    let wanted = |line: &&str| {
        let key = line.split_once(' ').map_or(*line, |(key, _)| key);
        SETTINGS.iter().any(|setting| {
            key.strip_prefix(setting).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        })
    };
    dump.lines().filter(wanted).map(|line| line.trim_end_matches(';').to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_archives_of_this_debian_are_used() {
        let lists = "http://a.test/debian/|stable|main|bookworm|Debian|Debian\n\
            http://a.test/debian/|stable|main|bookworm|Debian|Debian\n\
            http://a.test/debian/|bookworm-updates|main|bookworm-updates|Debian|Debian\n\
            http://a.test/security/|bookworm-security|main|bookworm-security|Debian|Debian-Security\n\
            http://a.test/debian/|bookworm|contrib|bookworm|Debian|Debian\n\
            http://a.test/debian/|bookworm-backports|main|bookworm-backports|Debian Backports|Debian Backports\n\
            http://a.test/debian/|trixie|main|trixie|Debian|Debian\n\
            https://b.test/x/|bookworm|main|bookworm|Stranger|Debian\n\
            https://b.test/x/|bookworm|main|bookworm||\n\
            nonsense\n";
        let found = lines(lists, "bookworm");
        let ends = [
            "http://a.test/debian/ stable main",
            "http://a.test/debian/ bookworm-updates main",
            "http://a.test/security/ bookworm-security main",
        ];
        assert_eq!(found.len(), ends.len(), "{found:?}");
        for (line, end) in found.iter().zip(ends) {
            assert!(line.starts_with("deb [signed-by=/") && line.ends_with(end), "{line}");
        }
    }

    #[test]
    fn only_debian_has_a_codename() {
        assert_eq!(codename("ID=debian\nVERSION_CODENAME=bookworm\n").as_deref(), Some("bookworm"));
        assert_eq!(codename("ID=\"debian\"\nVERSION_CODENAME=trixie").as_deref(), Some("trixie"));
        assert_eq!(codename("ID=ubuntu\nVERSION_CODENAME=noble"), None);
        assert_eq!(codename("ID=debian\nVERSION_CODENAME=../x"), None);
        assert_eq!(codename(""), None);
    }

    #[test]
    fn proxies_of_the_host_are_taken_over() {
        let dump = "APT \"\";\nAcquire::http::Proxy \"http://p.test:1\";\n\
            Acquire::http::Proxy::x.test \"DIRECT\";\nAcquire::http::Timeout \"5\";\n\
            Acquire::Check-Valid-Until \"false\";\n";
        let expected = [
            "Acquire::http::Proxy \"http://p.test:1\"",
            "Acquire::http::Proxy::x.test \"DIRECT\"",
            "Acquire::Check-Valid-Until \"false\"",
        ];
        assert_eq!(options(dump), expected);
    }
}
