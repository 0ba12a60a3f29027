//! `torpor kernel`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde::Serialize;
use torpor_daemon::Config;
use torpor_daemon::config::Overrides;
use torpor_kernel::{Kernel as Ready, KernelError, Listed};
use torpor_store::Layout;

use super::host::{block_on, chain, settle};
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::units;

/// Manage the kernels that microVMs boot.
///
/// Only the engine `microvm` needs one. Each template is booted with the newest kernel that is here;
/// machines and snapshots that exist do not need theirs any more.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor kernel fetch\n  \
    torpor kernel fetch --package linux-image-6.12.95+deb12-cloud-amd64.deb\n  \
    torpor kernel fetch --vmlinux vmlinux --modules /lib/modules/6.12.95\n  torpor kernel ls")]
pub(super) struct Kernel {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Fetch a kernel: Debian's newest for clouds, through this host's apt.
    ///
    /// Nothing is installed on this computer, and no script of a package runs. Prints the release.
    Fetch {
        /// Prepare this Debian package of a kernel instead.
        #[arg(long, value_name = "FILE", conflicts_with_all = ["vmlinux", "modules"])]
        package: Option<PathBuf>,
        /// Prepare this kernel instead: an ELF file or a bzImage, with CONFIG_PVH.
        #[arg(long, value_name = "FILE", requires = "modules")]
        vmlinux: Option<PathBuf>,
        /// The directory of that kernel's modules; it may be empty if all that is needed is built in.
        #[arg(long, value_name = "DIR", requires = "vmlinux")]
        modules: Option<PathBuf>,
        #[command(flatten)]
        place: Place,
    },
    /// List kernels, the newest first; each is checked against its hashes.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        place: Place,
    },
    /// Remove a kernel.
    Rm {
        /// As `torpor kernel ls` shows it.
        release: String,
        #[command(flatten)]
        place: Place,
    },
}

/// Where kernels are.
#[derive(Debug, Args)]
struct Place {
    /// Configuration file [default: /etc/torpor/torpor.toml, if it is there].
    #[arg(long, env = "TORPOR_CONFIG", value_name = "FILE", hide_env_values = true)]
    config: Option<PathBuf>,
    /// The daemon's data directory [default: /var/lib/torpor].
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// A kernel for machines.
#[derive(Serialize)]
struct Row<'a> {
    release: &'a str,
    id: Option<&'a str>,
    source: Option<&'a str>,
    bytes: u64,
    /// Why it can't be used.
    damage: Option<&'a str>,
}

#[derive(Serialize)]
struct Rows<'a> {
    kernels: Vec<Row<'a>>,
}

impl Kernel {
    pub(super) fn run(self) -> Result<ExitCode> {
        match self.action {
            Action::Fetch { package, vmlinux, modules, place } => {
                let kernels = place.kernels()?;
                let files = vmlinux.zip(modules);
                let kernel = block_on(get(package, files, kernels))??;
                output::line(&plain(&kernel.release))?;
            }
            Action::Ls { json, place } => {
                let list = torpor_kernel::list(&place.kernels()?);
                let list = list.map_err(|error| failed(&error))?;
                output::show(json, &Rows { kernels: list.iter().map(row).collect() }, || {
                    table(&list)
                })?;
            }
            Action::Rm { release, place } => {
                let removed = torpor_kernel::remove(&place.kernels()?, &release);
                removed.map_err(|error| failed(&error))?;
                output::line(&plain(&release))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Place {
    fn kernels(self) -> Result<PathBuf> {
        let overrides = Overrides { data_dir: self.data_dir, ..Overrides::default() };
        let config = Config::load(self.config.as_deref(), overrides)
            .map_err(|error| Error::usage(error.to_string()))?;
        settle();
        Ok(Layout::kernels_in(&config.data_dir))
    }
}

/// A signal ends it, and nothing half done stays.
async fn get(
    package: Option<PathBuf>,
    files: Option<(PathBuf, PathBuf)>,
    kernels: PathBuf,
) -> Result<Ready> {
    let mut signals = Signals::new()?;
    let progress = Progress::waiting("preparing the kernel");
    let mut tell = |text: &str| progress.say(plain(text));
    let got = async {
        match (package, files) {
            (Some(package), _) => {
                prepared(move || torpor_kernel::prepare_package(&package, &kernels)).await
            }
            (None, Some((vmlinux, modules))) => {
                let prepare = torpor_kernel::prepare_files;
                prepared(move || prepare(&vmlinux, &modules, &kernels)).await
            }
            (None, None) => fetched(&kernels, &mut tell).await,
        }
    };
    tokio::select! {
        got = got => got,
        ended = signals.next() => Err(ended),
    }
}

async fn fetched(kernels: &Path, tell: &mut (dyn FnMut(&str) + Send)) -> Result<Ready> {
    torpor_kernel::fetch(kernels, tell).await.map_err(|error| failed(&error))
}

async fn prepared(
    work: impl FnOnce() -> Result<Ready, KernelError> + Send + 'static,
) -> Result<Ready> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|error| Error::internal("the kernel was not prepared", error))?;
    done.map_err(|error| failed(&error))
}

fn failed(error: &KernelError) -> Error {
    Error::Failed { message: chain(error), hint: error.hint() }
}

fn row(kernel: &Listed) -> Row<'_> {
    Row {
        release: &kernel.release,
        id: kernel.id.as_deref(),
        source: kernel.source.as_deref(),
        bytes: kernel.bytes,
        damage: kernel.damage.as_deref(),
    }
}

fn table(kernels: &[Listed]) -> String {
    let row = |kernel: &Listed| {
        let or_dash = |text: Option<&str>| text.map_or_else(|| "-".to_owned(), plain);
        let state = kernel
            .damage
            .as_deref()
            .map_or("ok".to_owned(), |why| plain(&format!("damaged: {why}")));
        let (id, source) = (or_dash(kernel.id.as_deref()), or_dash(kernel.source.as_deref()));
        vec![plain(&kernel.release), id, units::show_bytes(kernel.bytes), state, source]
    };
    output::table(&["RELEASE", "ID", "SIZE", "STATE", "SOURCE"], kernels.iter().map(row).collect())
}
