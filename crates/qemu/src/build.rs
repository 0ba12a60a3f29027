//! Which QEMU is here, whether it will do, and what it needs to see of the host.
//!
//! Asked once when an engine is made: a machine's start asks nothing. What the program loads
//! (libraries, firmware) is found out here file by file, so that a jail shows it those and no more.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

use crate::jail::Seen;
use crate::line::{cpu_model, inside};
use crate::tick;

/// The oldest release that is used. 7.2 of Debian 12 corrupts its guests under load when it emulates
/// the processor; 8.2 to 9 were never tried.
pub const OLDEST: (u32, u32) = (10, 0);
/// Emulates as well as it uses KVM.
const FULL: &str = "qemu-system-x86_64";
/// Debian's smaller build: this machine type and KVM only, and starts in half the time.
const TRIMMED: &str = "qemu-system-x86_64-microvm";
/// The firmware that boots a kernel without a BIOS. With the default one (SeaBIOS) kernels hang.
const FIRMWARE: &str = "qboot.rom";
/// Where the dynamic linker finds libraries outside of the directories that it knows.
const LINKER_CACHE: &str = "/etc/ld.so.cache";
/// QEMU answers in 30 ms; a host that needs so long has other problems.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// What ends a QEMU that has its control channel at its stdin.
const QUIT: &[u8] = br#"{"execute":"qmp_capabilities"}{"execute":"quit"}"#;
/// More libraries than any build has (Debian's: 48): each is a mount in every jail.
const LIBRARIES_MAX: usize = 256;

/// Who executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accel {
    /// The processor.
    Kvm,
    /// QEMU, ten times slower.
    Tcg,
}

impl Accel {
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// A QEMU that will do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Build {
    pub program: PathBuf,
    pub version: (u32, u32, u32),
    /// As it names itself, `10.0.2 (Debian 1:10.0.2+ds-2)`; saved machines are tied to it.
    pub text: String,
    pub accel: Accel,
    pub firmware: PathBuf,
    /// What the program is linked with, the linker among them.
    pub libraries: Vec<PathBuf>,
    /// Emulated guests count the host's ticks and can't find out how fast they are (there is no
    /// timer to compare with); `None` where KVM tells them.
    pub tick_khz: Option<u64>,
}

/// Why a QEMU can't be used; says what to do.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(
        "{} can't be run: install QEMU 10 or newer \
         (Debian 12: apt install -t bookworm-backports qemu-system-x86)",
        program.display()
    )]
    Missing {
        program: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} {question} did not answer", program.display())]
    Silent { program: PathBuf, question: String },
    #[error("{} --version says {text:?}, in which there is no version", program.display())]
    Unknown { program: PathBuf, text: String },
    #[error(
        "QEMU {text} is too old: releases before 10.0 corrupt their guests under load; install a \
         newer one (Debian 12: apt install -t bookworm-backports qemu-system-x86)"
    )]
    TooOld { text: String },
    #[error("{} has no machine type microvm", program.display())]
    NoMicrovm { program: PathBuf },
    #[error(
        "{FIRMWARE} is in none of the firmware directories of {} ({searched}); \
         Debian has it in qemu-system-data",
        program.display()
    )]
    NoFirmware { program: PathBuf, searched: String },
    #[error("{} misses the library {library}", program.display())]
    NoLibrary { program: PathBuf, library: String },
    #[error("{} is linked with more than {LIBRARIES_MAX} libraries", program.display())]
    ManyLibraries { program: PathBuf },
    #[error(
        "{} does not start with KVM ({reason}): whoever runs the computer below this one must \
         switch nested virtualization on; otherwise use gVisor",
        program.display()
    )]
    NoKvm { program: PathBuf, reason: String },
}

impl Build {
    /// Asks `program`, or else the best one on the search path, and checks that it will do.
    pub async fn find(program: Option<&Path>, accel: Accel) -> Result<Self, BuildError> {
        let program = match program {
            Some(program) => program.to_owned(),
            None => best(accel, &places()),
        };
        let said = ask(&program, &["--version"], &[]).await?;
        let (version, text) = parse_version(&said)
            .ok_or_else(|| BuildError::Unknown { program: program.clone(), text: first(&said) })?;
        if (version.0, version.1) < OLDEST {
            return Err(BuildError::TooOld { text });
        }
        let machines = ask(&program, &["-machine", "help"], &[]).await?;
        if !machines.lines().any(|line| line.split_whitespace().next() == Some("microvm")) {
            return Err(BuildError::NoMicrovm { program });
        }
        let directories = ask(&program, &["-L", "help"], &[]).await?;
        let Some(firmware) = directories
            .lines()
            .map(|directory| Path::new(directory.trim()).join(FIRMWARE))
            .find(|path| path.is_file())
        else {
            let searched = directories.split_whitespace().collect::<Vec<_>>().join(", ");
            return Err(BuildError::NoFirmware { program, searched });
        };
        let libraries = libraries(&program).await?;
        let tick_khz = match accel {
            Accel::Kvm => {
                start_with_kvm(&program).await?;
                None
            }
            Accel::Tcg => tick::khz().await,
        };
        Ok(Self { program, version, text, accel, firmware, libraries, tick_khz })
    }

    /// What every jail of this QEMU must show it, besides the files of its machine.
    pub fn seen(&self) -> Vec<Seen> {
        let mut seen: Vec<Seen> = [&self.program]
            .into_iter()
            .chain(&self.libraries)
            .map(|path| Seen::read(path, path))
            .collect();
        let cache = Path::new(LINKER_CACHE);
        if cache.is_file() {
            seen.push(Seen::read(cache, cache));
        }
        let firmware = Path::new(inside::FIRMWARES).join(FIRMWARE);
        seen.push(Seen::read(&self.firmware, firmware));
        seen
    }
}

/// Where programs are looked for.
fn places() -> Vec<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/bin", "/usr/local/bin"].map(PathBuf::from);
    std::env::split_paths(&search).filter(|place| place.is_absolute()).chain(usual).collect()
}

/// The first of the programs that fit `accel` in `places`; a path that says what is missing if
/// there is none.
fn best(accel: Accel, places: &[PathBuf]) -> PathBuf {
    let names: &[&str] = match accel {
        Accel::Kvm => &[TRIMMED, FULL],
        Accel::Tcg => &[FULL],
    };
    names
        .iter()
        .flat_map(|name| places.iter().map(move |place| place.join(name)))
        .find(|path| path.is_file())
        .unwrap_or_else(|| Path::new("/usr/bin").join(FULL))
}

/// What the program says on its output; how it ends is not asked (`-L help` is an error to some).
async fn ask(
    program: &Path,
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Result<String, BuildError> {
    let mut command = Command::new(program);
    command.args(arguments).envs(environment.iter().copied());
    command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    match timeout(ANSWER_MAX, command.output()).await {
        Err(_) => {
            Err(BuildError::Silent { program: program.into(), question: arguments.join(" ") })
        }
        Ok(Err(source)) => Err(BuildError::Missing { program: program.into(), source }),
        Ok(Ok(output)) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
    }
}

/// Makes a machine with KVM that executes nothing, and ends it. A /dev/kvm that opens, and even one that
/// runs a small guest, may refuse what QEMU sets up for a whole processor, and QEMU then aborts.
async fn start_with_kvm(program: &Path) -> Result<(), BuildError> {
    let mut command = Command::new(program);
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-S", "-m", "16M"]);
    command.args(["-machine", "microvm,isa-serial=off,x-option-roms=off", "-bios", FIRMWARE]);
    command.args(["-accel", Accel::Kvm.name(), "-cpu", cpu_model(Accel::Kvm), "-qmp", "stdio"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let missing = |source| BuildError::Missing { program: program.into(), source };
    let ended = async {
        let mut child = command.spawn()?;
        if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            // An abort is an answer here, and no file shall be left of it.
            let none = Rlimit { current: Some(0), maximum: Some(0) };
            let _ = prlimit(Some(pid), Resource::Core, none);
        }
        if let Some(mut stdin) = child.stdin.take() {
            // A QEMU that is gone by now says why.
            let _ = stdin.write_all(QUIT).await;
        }
        child.wait_with_output().await
    };
    let reason = match timeout(ANSWER_MAX, ended).await {
        Ok(output) => {
            let output = output.map_err(missing)?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr);
            format!("{}: {}", output.status, first(&said))
        }
        Err(_) => format!("no answer within {} seconds", ANSWER_MAX.as_secs()),
    };
    Err(BuildError::NoKvm { program: program.into(), reason })
}

/// The dynamic linker itself says what it would load. Asked about a program without libraries, the
/// program runs: `--version` then does no harm.
async fn libraries(program: &Path) -> Result<Vec<PathBuf>, BuildError> {
    let said = ask(program, &["--version"], &[("LD_TRACE_LOADED_OBJECTS", "1")]).await?;
    let libraries = parse_libraries(&said)
        .map_err(|library| BuildError::NoLibrary { program: program.into(), library })?;
    if libraries.len() > LIBRARIES_MAX {
        return Err(BuildError::ManyLibraries { program: program.into() });
    }
    Ok(libraries)
}

/// `libc.so.6 => /lib/libc.so.6 (0x00007f…)`, `/lib64/ld-linux-x86-64.so.2 (0x00007f…)`; lines
/// without a path are the kernel's. An error is the name of what was not found.
fn parse_libraries(said: &str) -> Result<Vec<PathBuf>, String> {
    let mut libraries = Vec::new();
    for line in said.lines() {
        let line = line.trim();
        let (name, place) = line.split_once(" => ").unwrap_or(("", line));
        if place.starts_with("not found") {
            return Err(name.to_owned());
        }
        let path = place.rsplit_once(" (0x").map_or("", |(path, _)| path.trim());
        let path = PathBuf::from(path);
        if path.is_absolute() && !libraries.contains(&path) {
            libraries.push(path);
        }
    }
    Ok(libraries)
}

/// `QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)`
fn parse_version(said: &str) -> Option<((u32, u32, u32), String)> {
    let text = first(said).strip_prefix("QEMU emulator version ")?.trim().to_owned();
    let mut numbers = text.split_whitespace().next()?.split('.');
    let mut number = || -> Option<u32> {
        let digits: String = numbers.next()?.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    };
    let version = (number()?, number()?, number().unwrap_or(0));
    Some((version, text))
}

fn first(said: &str) -> String {
    said.lines().next().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests;
