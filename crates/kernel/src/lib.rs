//! Kernels for microVMs: `fetch` takes the distribution's package through the machine's own package
//! manager, `prepare_package` takes it apart, `initramfs` puts together what a machine boots with.
//!
//! ```text
//! kernels/<release>/
//!   kernel.json     release, where it came from, hashes of all below
//!   vmlinux         uncompressed, with a PVH note
//!   modules/NN-name.ko   in the order in which they are loaded, uncompressed
//! ```
//!
//! ```text
//!   fetch ─▶ apt ─┐                            ┌─▶ image ──▶ elf
//!   --package ────┴─▶ prepare ─▶ package ─▶ ar ┼─▶ modules ─▶ elf
//!   --vmlinux ──────▶ prepare ─────────────────┴─▶ installed (stage, fsync, rename)
//! ```
//!
//! Invariants
//! - nothing of a package is run, and no name in it becomes a path of ours;
//! - whatever is unpacked has a limit, whatever its header says;
//! - a directory under its release is whole: it got there by a rename.

mod apt;
mod ar;
mod elf;
mod image;
mod initramfs;
mod installed;
mod lz4;
mod modules;
mod package;
mod prepare;
mod release;
mod unpack;

#[cfg(test)]
mod forge;

use std::path::PathBuf;

pub use apt::fetch;
pub use initramfs::initramfs;
pub use installed::{Listed, list, newest, remove};
pub use prepare::{prepare_files, prepare_package};

/// A kernel that is ready to be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// `6.12.95+deb12-cloud-amd64`.
    pub release: String,
    /// Names this kernel and its modules, and no others: a saved machine is tied to it.
    pub id: String,
    /// Uncompressed ELF.
    pub vmlinux: PathBuf,
    /// In the order in which they are loaded.
    pub modules: Vec<PathBuf>,
}

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("no kernel for microVMs is here")]
    None,
    #[error("there is no kernel {0} here")]
    Unknown(String),
    #[error("kernel {release} is damaged: {why}")]
    Damaged { release: String, why: String },
    /// The package, kernel or module is not what a machine could boot.
    #[error("{what} can't be used: {why}")]
    Unfit { what: String, why: String },
    /// Nobody on this computer can be asked for a kernel.
    #[error("no kernel can be fetched on this computer: {0}")]
    NoSource(String),
    #[error("another process is at work in {}", .0.display())]
    Busy(PathBuf),
    #[error("could not {action}")]
    Failed {
        action: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl KernelError {
    /// What to do about it, if there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::None => Some("get one with: torpor kernel fetch".to_owned()),
            Self::Unknown(_) => Some("list them with: torpor kernel ls".to_owned()),
            Self::Damaged { release, .. } => {
                Some(format!("remove it with: torpor kernel rm {release}, and fetch it again"))
            }
            Self::NoSource(_) => Some(
                "give Debian's cloud kernel with --package FILE.deb, or a kernel of your own with \
                 --vmlinux FILE --modules DIR"
                    .to_owned(),
            ),
            Self::Failed { source, .. } if is_denied(source.as_ref()) => {
                Some("run it as root, as the daemon".to_owned())
            }
            Self::Unfit { .. } | Self::Busy(_) | Self::Failed { .. } => None,
        }
    }
}

fn is_denied(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

pub(crate) fn unfit(what: impl Into<String>, why: impl Into<String>) -> KernelError {
    KernelError::Unfit { what: what.into(), why: why.into() }
}

/// For `map_err`: says what was being done.
pub(crate) fn failed<E>(action: impl Into<String>) -> impl FnOnce(E) -> KernelError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let action = action.into();
    move |error| KernelError::Failed { action, source: error.into() }
}
