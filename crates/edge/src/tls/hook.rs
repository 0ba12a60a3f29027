//! The operator's program that sets and removes records, for those who want to see that all names
//! below a domain are ours.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;

/// How long the program may take: it speaks with a name service, and may wait until its servers know.
const DEADLINE: Duration = Duration::from_secs(180);
/// So much of what it says is repeated when it fails.
const SAID_MAX: u64 = 1000;

/// Why a record was not set.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("the program {} could not be run", program.display())]
    Run {
        program: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the program {} did not end within {DEADLINE:?}", .0.display())]
    Late(PathBuf),
    #[error("the program {} failed: {said}", program.display())]
    Failed { program: PathBuf, said: String },
}

/// The program.
#[derive(Debug, Clone)]
pub(super) struct Hook {
    program: PathBuf,
}

impl Hook {
    pub(super) fn new(program: PathBuf) -> Self {
        Self { program }
    }

    pub(super) async fn present(&self, name: &str, value: &str) -> Result<(), HookError> {
        self.call("present", name, value).await
    }

    /// A record that stays is untidy and harmless.
    pub(super) async fn cleanup(&self, name: &str, value: &str) {
        if let Err(error) = self.call("cleanup", name, value).await {
            let error = torpor_lifecycle::chain(&error);
            tracing::warn!(name, error, "a record that is not needed any more was not removed");
        }
    }

    async fn call(&self, verb: &str, name: &str, value: &str) -> Result<(), HookError> {
        let run = |source| HookError::Run { program: self.program.clone(), source };
        let mut child = Command::new(&self.program)
            .args([verb, name, value])
            // Our own secrets are none of its business.
            .env_remove("TORPOR_API_KEY")
            .env_remove("TORPOR_SECRET_KEY")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(run)?;
        let mut errors = child.stderr.take().expect("it was asked for").take(SAID_MAX);
        let ended = async {
            let mut said = Vec::new();
            errors.read_to_end(&mut said).await?;
            // The rest is read and dropped, or the program would wait for ever.
            tokio::io::copy(&mut errors.into_inner(), &mut tokio::io::sink()).await?;
            Ok((child.wait().await?, said))
        };
        let ended = tokio::time::timeout(DEADLINE, ended).await;
        let (status, said) =
            ended.map_err(|_| HookError::Late(self.program.clone()))?.map_err(run)?;
        if status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&said).trim().to_owned();
        let said = if said.is_empty() { status.to_string() } else { said };
        Err(HookError::Failed { program: self.program.clone(), said })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn program(script: &str) -> (tempfile::TempDir, Hook) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hook");
        std::fs::write(&path, format!("#!/bin/sh\ncd {}\n{script}\n", dir.path().display()))
            .unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        (dir, Hook::new(path))
    }

    #[tokio::test]
    async fn the_program_is_told_the_record_word_by_word() {
        let (dir, hook) = program("echo \"$#:$1:$2:$3\" >> said");
        hook.present("_acme-challenge.example.org", "a b;c").await.unwrap();
        hook.cleanup("_acme-challenge.example.org", "a b;c").await;
        let said = std::fs::read_to_string(dir.path().join("said")).unwrap();
        let name = "_acme-challenge.example.org";
        assert_eq!(said, format!("3:present:{name}:a b;c\n3:cleanup:{name}:a b;c\n"));
    }

    #[tokio::test]
    async fn what_a_failing_program_says_is_repeated_and_bounded() {
        let (_dir, hook) = program("head -c 300000 /dev/zero | tr '\\0' x >&2; exit 3");
        let error = hook.present("n", "v").await.unwrap_err().to_string();
        assert!(error.contains("xxxx") && error.len() < 1300, "{}", error.len());
        let (_dir, hook) = program("exit 3");
        let error = hook.present("n", "v").await.unwrap_err().to_string();
        assert!(error.contains('3'), "{error}");
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let error = Hook::new("/nowhere/hook".into()).present("n", "v").await.unwrap_err();
        assert!(error.to_string().contains("/nowhere/hook"), "{error}");
    }
}
