//! Which runsc this is.
//!
//! The calls we make mean the same in every build from [`OLDEST`] on; what differs between builds
//! belongs here.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

/// The oldest build whose control socket is known to speak as we do.
pub const OLDEST: u32 = 20_240_729;
/// From this build on an idle machine costs next to no processor time.
const QUIET_SINCE: u32 = 20_260_622;
/// `runsc --version` takes 15 ms; a machine that needs so long has other problems.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// A build of runsc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Build {
    /// As it names itself; saved machines are tied to it.
    pub text: String,
    /// The date in it, as a number: 20240729.
    pub date: u32,
}

/// Why a runsc can't be used; says what to do.
#[derive(Debug, thiserror::Error)]
pub enum VersionError {
    #[error(
        "{} can't be run: install runsc (Debian: apt install -t bookworm-backports runsc)",
        path.display()
    )]
    Missing {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} --version did not answer", path.display())]
    Silent { path: PathBuf },
    #[error("{} --version says {text:?}, in which there is no release date", path.display())]
    Unknown { path: PathBuf, text: String },
    #[error("runsc {text} is too old: install release {OLDEST} or newer")]
    TooOld { text: String },
}

impl Build {
    /// Asks `runsc` and checks that the answer will do.
    pub async fn of(runsc: &Path) -> Result<Self, VersionError> {
        let path = runsc.to_owned();
        let mut command = Command::new(runsc);
        command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
        let output = match timeout(ANSWER_MAX, command.output()).await {
            Err(_) => return Err(VersionError::Silent { path }),
            Ok(Err(source)) => return Err(VersionError::Missing { path, source }),
            Ok(Ok(output)) => output,
        };
        let stdout = String::from_utf8_lossy(&output.stdout);
        let text = stdout.lines().next().unwrap_or_default().trim();
        let text = text.strip_prefix("runsc version ").unwrap_or(text).to_owned();
        let Some(build) = Self::parse(&text) else {
            return Err(VersionError::Unknown { path, text });
        };
        if build.date < OLDEST {
            return Err(VersionError::TooOld { text });
        }
        Ok(build)
    }

    /// `0.0~20240729.0` (Debian) and `release-20260622.0`, `release-20260622.0-12-gabcdef`
    /// (upstream): the first run of eight digits is the date.
    fn parse(text: &str) -> Option<Self> {
        let date = text.split(|c: char| !c.is_ascii_digit()).find(|run| run.len() == 8)?;
        Some(Self { text: text.to_owned(), date: date.parse().ok()? })
    }

    /// Whether an idle machine that is not frozen leaves the processor alone.
    pub fn idles_quietly(&self) -> bool {
        self.date >= QUIET_SINCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_naming_a_build_are_understood() {
        let known = [
            ("0.0~20240729.0", 20_240_729),
            ("release-20260622.0", 20_260_622),
            ("release-20260622.0-12-g0123456789ab", 20_260_622),
        ];
        for (text, date) in known {
            assert_eq!(Build::parse(text).unwrap().date, date, "{text}");
        }
        for text in ["", "VERSION_MISSING", "1.2.3", "release-2026"] {
            assert_eq!(Build::parse(text), None, "{text}");
        }
    }

    #[tokio::test]
    async fn a_runsc_that_is_not_there_or_too_old_is_refused_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let runsc = dir.path().join("runsc");
        let error = Build::of(&runsc).await.unwrap_err().to_string();
        assert!(error.contains("install runsc"), "{error}");

        std::fs::write(&runsc, "#!/bin/sh\necho runsc version release-20230102.0\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&runsc, mode).unwrap();
        let error = Build::of(&runsc).await.unwrap_err().to_string();
        assert!(error.contains("too old") && error.contains("20240729"), "{error}");
    }
}
