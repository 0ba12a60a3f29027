//! The microVM engine under test: how it is installed, and what is particular to it.

mod jail;
mod kvm;
mod memory;
mod particular;
mod resources;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use torpor_engines::EngineConfig;
use torpor_engines::microvm::MicrovmConfig;
use torpor_kernel::Kernel;
use torpor_lifecycle::engine::{Engine, EngineError};
use torpor_qemu::build::{Accel, Build};

use crate::world::{Installation, Settings, be, chain, told, unfit};

/// What runs the machines: `kvm`, which must then work, or nobody said so and they are emulated.
const ACCEL: &str = "TORPOR_TEST_ACCEL";

/// Where there may be a kernel, by the variables that say so.
const KERNELS: [(&str, &str); 2] = [("TORPOR_TEST_KERNELS", ""), ("TORPOR_TEST_CACHE", "kernels")];

pub(crate) struct Installed(OnceLock<(Build, Kernel)>);

impl Installed {
    pub(crate) fn new() -> Self {
        Self(OnceLock::new())
    }

    async fn lacks(&self) -> Option<String> {
        if let Some(why) = unfit(&["/usr/bin/mkfs.erofs"]) {
            return Some(why);
        }
        match self.look().await {
            Ok(found) => {
                self.0.get_or_init(|| found);
                None
            }
            Err(why) => Some(why),
        }
    }

    async fn look(&self) -> Result<(Build, Kernel), String> {
        let build = Build::find(None, accel()).await.map_err(|error| chain(&error))?;
        let kernel = torpor_kernel::newest(&kernels()).map_err(|error| chain(&error))?;
        Ok((build, kernel))
    }
}

fn accel() -> Accel {
    match std::env::var(ACCEL).as_deref() {
        Ok("kvm") => Accel::Kvm,
        Ok(other) => panic!("{ACCEL}={other} is nothing that runs machines"),
        Err(_) => Accel::Tcg,
    }
}

fn kernels() -> PathBuf {
    let told = KERNELS
        .iter()
        .find_map(|(variable, below)| Some(PathBuf::from(std::env::var_os(variable)?).join(below)));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is below target");
    told.unwrap_or_else(|| target.join("test-cache/kernels"))
}

/// No test, but the starter of the tests' QEMUs: see [`be`].
#[test]
fn jail_process() {
    if let Some(description) = told() {
        torpor_qemu::jail::start(&description).unwrap();
    }
}

/// Shared by all tests, as each process has one: what is in it is paid once.
fn templates_dir() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("templates")
}

#[async_trait]
impl Installation for Installed {
    async fn unfit(&self) -> Option<String> {
        let why = self.lacks().await;
        // Whoever asks for KVM has a host that was made for it.
        assert!(accel() == Accel::Tcg || why.is_none(), "{why:?}");
        why
    }

    async fn open(&self, settings: &Settings) -> Result<Arc<dyn Engine>, EngineError> {
        let (qemu, kernel) = self.0.get().expect("this host was looked at").clone();
        let config = MicrovmConfig {
            qemu,
            kernel,
            templates_dir: templates_dir(),
            jail_command: be("microvm::jail_process"),
        };
        settings.open(EngineConfig::Microvm(config)).await
    }

    fn home(&self, settings: &Settings) -> PathBuf {
        settings.runtime_dir.join(&settings.tag).join("vm")
    }

    fn rounds(&self, many: usize) -> usize {
        many.div_ceil(4)
    }

    /// The word with the time goes through an emulated processor, which shares the host's with others:
    /// so long it may take from one clock to the other.
    fn clock_slack(&self) -> Duration {
        Duration::from_millis(500)
    }
}
