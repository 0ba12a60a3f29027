//! Which runsc this is: a program, named by what it calls itself and by its bytes.
//!
//! What differs between builds is a matter of their [`Generation`]; the programs of an installation,
//! of which old ones are kept while something needs them, are its [`Builds`].

mod copies;
mod generation;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::process::Command;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

pub(super) use self::copies::Builds;
pub use self::generation::{Generation, Halt};
use self::generation::{OLDEST, Unused};
pub(super) use self::generation::{of_another_build, unknown_method};
pub(crate) use self::generation::{remove_state, unmount_state};

/// `runsc --version` takes 15 ms; a machine that needs so long has other problems.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Where a release has the programs that runsc starts, beside it.
const SIDECARS: &str = "gvisor-bin";
/// So many digits of a program's hash tell builds apart.
const HASH_DIGITS: usize = 12;

/// A build of runsc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Build {
    pub(super) program: PathBuf,
    /// As it names itself.
    version: String,
    /// Of its bytes, and of what it runs beside it.
    hash: String,
    date: u32,
    pub(super) generation: Generation,
}

/// As saves and records name it: `release-20260817.0+0123456789ab`.
impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.version, self.hash)
    }
}

/// Why a runsc can't be used; says what to do.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(
        "{} can't be run: install runsc (Debian: apt install -t bookworm-backports runsc)",
        path.display()
    )]
    Missing {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} --version did not answer", path.display())]
    Silent { path: PathBuf },
    #[error("{} --version says {text:?}, in which there is no release date", path.display())]
    Unknown { path: PathBuf, text: String },
    #[error("runsc {text} is too old: install release {OLDEST} or newer")]
    TooOld { text: String },
    #[error(
        "runsc {text} is not used: it {why}; install release-20260622 or newer (scripts/setup --runsc \
         upstream), or the distribution's 20240729"
    )]
    Harmful { text: String, why: &'static str },
    #[error("runsc {text} does not answer as builds of its date do: {words}")]
    Strange { text: String, words: String },
}

impl Build {
    /// Asks `runsc` and checks that the answers will do.
    pub async fn of(runsc: &Path) -> Result<Self, BuildError> {
        let path = runsc.to_owned();
        let output = ask(runsc, &[]).await?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let text = stdout.lines().next().unwrap_or_default().trim();
        let text = text.strip_prefix("runsc version ").unwrap_or(text).to_owned();
        let Some(date) = date(&text) else {
            return Err(BuildError::Unknown { path, text });
        };
        let generation = match Generation::of(date) {
            Ok(generation) => generation,
            Err(Unused::TooOld) => return Err(BuildError::TooOld { text }),
            Err(Unused::Harmful(why)) => return Err(BuildError::Harmful { text, why }),
        };
        let output = ask(runsc, generation.flags()).await?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr);
            let words = words.lines().next().unwrap_or_default().to_owned();
            return Err(BuildError::Strange { text, words });
        }
        let missing = |source| BuildError::Missing { path: path.clone(), source };
        let hash = hash_of(runsc).await.map_err(missing)?;
        Ok(Self { program: path, version: text, hash, date, generation })
    }

    /// Whether this is the build that a save or a record names; those of earlier daemons named a
    /// version and no hash.
    fn is(&self, name: &str) -> bool {
        match name.split_once('+') {
            Some((version, hash)) => version == self.version && hash == self.hash,
            None => name == self.version,
        }
    }

    /// How this build was tried out, if it was.
    pub fn proof(&self) -> Option<&'static str> {
        generation::proof(&self.version)
    }

    /// Whether a distribution made it.
    pub fn of_a_distribution(&self) -> bool {
        !self.version.starts_with("release-")
    }

    /// Whether a guest can reach the host through `/dev/cuse`, where there is one.
    pub fn misuses_cuse(&self) -> bool {
        generation::misuses_cuse(self.date)
    }

    pub fn generation(&self) -> Generation {
        self.generation
    }
}

/// `runsc FLAGS --version`
async fn ask(runsc: &Path, flags: &[&str]) -> Result<Output, BuildError> {
    let path = runsc.to_owned();
    let mut command = Command::new(runsc);
    command.args(flags).arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    match timeout(ANSWER_MAX, command.output()).await {
        Err(_) => Err(BuildError::Silent { path }),
        Ok(Err(source)) => Err(BuildError::Missing { path, source }),
        Ok(Ok(output)) => Ok(output),
    }
}

/// The first run of eight digits is the date: `0.0~20240729.0` (Debian), `release-20260622.0`,
/// `release-20260622.0-12-gabcdef` (upstream).
fn date(text: &str) -> Option<u32> {
    text.split(|c: char| !c.is_ascii_digit()).find(|run| run.len() == 8)?.parse().ok()
}

/// The program, and the files it runs that official releases have beside it.
fn parts(runsc: &Path) -> io::Result<Vec<PathBuf>> {
    let program = std::fs::canonicalize(runsc)?;
    let sidecars = program.with_file_name(SIDECARS);
    let mut parts = vec![program];
    if sidecars.is_dir() {
        let found: io::Result<Vec<_>> = std::fs::read_dir(sidecars)?.collect();
        parts.extend(found?.iter().map(std::fs::DirEntry::path));
        parts[1..].sort();
    }
    Ok(parts)
}

async fn hash_of(runsc: &Path) -> io::Result<String> {
    let runsc = runsc.to_owned();
    let hashed = spawn_blocking(move || {
        let mut hasher = blake3::Hasher::new();
        for part in parts(&runsc)? {
            io::copy(&mut std::fs::File::open(part)?, &mut hasher)?;
        }
        Ok(hasher.finalize().to_hex()[..HASH_DIGITS].to_owned())
    });
    hashed.await.map_err(io::Error::other)?
}

#[cfg(test)]
impl Build {
    /// One that nobody runs.
    pub(super) fn on_paper() -> std::sync::Arc<Self> {
        Self {
            program: "/runsc".into(),
            version: "release-20260817.0".into(),
            hash: "0".repeat(HASH_DIGITS),
            date: 20_260_817,
            generation: Generation::Y2026,
        }
        .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A runsc that says only this of itself.
    pub(super) fn program(dir: &Path, version: &str) -> PathBuf {
        let runsc = dir.join("runsc");
        std::fs::write(&runsc, format!("#!/bin/sh\necho runsc version {version}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&runsc, mode).unwrap();
        runsc
    }

    async fn refusal(version: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        Build::of(&program(dir.path(), version)).await.unwrap_err().to_string()
    }

    #[test]
    fn both_ways_of_naming_a_build_are_understood() {
        let known = [
            ("0.0~20240729.0", 20_240_729),
            ("release-20260622.0", 20_260_622),
            ("release-20260622.0-12-g0123456789ab", 20_260_622),
        ];
        for (text, number) in known {
            assert_eq!(date(text), Some(number), "{text}");
        }
        for text in ["", "VERSION_MISSING", "1.2.3", "release-2026"] {
            assert_eq!(date(text), None, "{text}");
        }
    }

    #[test]
    fn no_sandbox_opens_files_of_the_host_by_itself() {
        for generation in [Generation::Y2024, Generation::Y2026] {
            assert!(generation.flags().contains(&"--directfs=false"), "{generation:?}");
        }
    }

    #[tokio::test]
    async fn a_runsc_that_is_not_there_or_too_old_is_refused_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let error = Build::of(&dir.path().join("runsc")).await.unwrap_err().to_string();
        assert!(error.contains("install runsc"), "{error}");
        let error = refusal("release-20230102.0").await;
        assert!(error.contains("too old") && error.contains("20240729"), "{error}");
    }

    #[tokio::test]
    async fn a_build_that_loses_sandboxes_or_starts_none_is_refused_by_name_with_the_reason() {
        for (version, why) in [
            ("release-20241217.0", "start"),
            ("release-20250623.0", "start"),
            ("release-20250624.0", "loses"),
            ("release-20260615.0", "loses"),
        ] {
            let error = refusal(version).await;
            for part in [version, why, "20260622", "20240729"] {
                assert!(error.contains(part), "{error} does not say {part}");
            }
        }
    }

    #[tokio::test]
    async fn a_build_that_does_not_know_what_builds_of_its_date_know_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let runsc = program(dir.path(), "release-20260817.0");
        let script = "#!/bin/sh\n[ $# = 1 ] || { echo flag provided but not defined >&2; exit 2; }\n\
                      echo runsc version release-20260817.0\n";
        std::fs::write(&runsc, script).unwrap();
        let error = Build::of(&runsc).await.unwrap_err().to_string();
        assert!(error.contains("release-20260817.0") && error.contains("not defined"), "{error}");
    }

    #[tokio::test]
    async fn a_save_names_a_build_by_version_and_bytes_and_an_old_one_by_version() {
        let dir = tempfile::tempdir().unwrap();
        let build = Build::of(&program(dir.path(), "release-20260817.0")).await.unwrap();
        assert!(build.is(&build.to_string()) && build.is("release-20260817.0"));
        assert!(!build.is("release-20260817.0+000000000000") && !build.is("release-20260810.0"));
    }

    #[tokio::test]
    async fn what_was_proven_is_proven_of_that_release_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        for (version, proven) in [
            ("0.0~20240729.0", true),
            ("release-20260817.0", true),
            ("release-20260817.0-70", true),
            ("release-20260817.01", false),
            ("release-20260824.0", false),
        ] {
            let build = Build::of(&program(dir.path(), version)).await.unwrap();
            assert_eq!(build.proof().is_some(), proven, "{version}");
        }
    }
}
