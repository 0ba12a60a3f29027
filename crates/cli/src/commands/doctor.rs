//! `torpor doctor`

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use torpor_daemon::{Finding, Verdict};

use super::host::{HostArgs, block_on};
use crate::error::{EXIT_FAILED, Result};
use crate::output::{self, plain};
use crate::progress::Progress;

/// Check this host, and say how to fix what is missing.
///
/// ✓ works, ! works less well than it could, ✗ does not work. Exits with 1 if something does not
/// work. Run it as root, as the daemon will be. With --production it also looks for what lets
/// hostile tenants reach each other or your secrets.
#[derive(Debug, Args)]
pub(super) struct Doctor {
    #[command(flatten)]
    host: HostArgs,
    /// Also check what matters before strangers' code is let in.
    #[arg(long)]
    production: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// A finding for machines.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    /// `ok`, `warn` or `fail`.
    verdict: &'static str,
    detail: &'a str,
    remedy: Option<&'a str>,
}

#[derive(Serialize)]
struct Reports<'a> {
    findings: Vec<Report<'a>>,
}

impl Doctor {
    pub(super) fn run(self) -> Result<ExitCode> {
        let file = self.host.file();
        let config = self.host.load(|_| ())?;
        let findings = block_on(async {
            let _progress = Progress::waiting("looking at this computer");
            let mut findings = torpor_daemon::doctor(&config).await;
            if self.production {
                findings.extend(torpor_daemon::production(&config, file.as_deref()).await);
            }
            findings
        })?;
        output::show(
            self.json,
            &Reports { findings: findings.iter().map(report).collect() },
            || text(&findings),
        )?;
        let failed = findings.iter().any(|finding| finding.verdict == Verdict::Fail);
        Ok(if failed { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS })
    }
}

fn report(finding: &Finding) -> Report<'_> {
    Report {
        name: finding.name,
        verdict: match finding.verdict {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        },
        detail: &finding.detail,
        remedy: finding.remedy.as_deref(),
    }
}

/// One line a finding; the remedy on a line of its own below it.
fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let sign = match finding.verdict {
            Verdict::Ok => '✓',
            Verdict::Warn => '!',
            Verdict::Fail => '✗',
        };
        text.push_str(&format!("{sign} {:width$}   {}\n", finding.name, plain(&finding.detail)));
        if let Some(remedy) = &finding.remedy {
            text.push_str(&format!("  {:width$}   hint: {}\n", "", plain(remedy)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_a_line_and_its_remedy_another() {
        let findings = [
            Finding { name: "runsc", verdict: Verdict::Ok, detail: "1.0".into(), remedy: None },
            Finding {
                name: "port",
                verdict: Verdict::Fail,
                detail: "taken\x1b".into(),
                remedy: Some("choose another".into()),
            },
        ];
        assert_eq!(
            text(&findings),
            "✓ runsc   1.0\n✗ port    taken\\u{1b}\n          hint: choose another\n"
        );
    }
}
