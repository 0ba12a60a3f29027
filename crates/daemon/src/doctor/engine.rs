//! Which engine this host gets and why, and what microVMs would take.
//!
//! Where gVisor serves the host, what microVMs lack is worth knowing and no defect.

use std::io;

use torpor_engines::probe::Finding;
use torpor_engines::probe::kvm::Kvm;
use torpor_kernel::{Kernel, KernelError};
use torpor_lifecycle::chain;
use torpor_qemu::build::{Accel, Build, BuildError};
use torpor_store::Layout;

use super::{failed, fine, warned};
use crate::config::{Config, EngineConfig, EngineKind};
use crate::engine::{self, Choice, Found, Leaning, lean, settle};

/// All that is found, and whether gVisor is what serves this host.
pub(super) struct Engines {
    pub(super) findings: Vec<Finding>,
    pub(super) gvisor: bool,
    /// Whether microVMs would have a processor that is not emulated.
    pub(super) kvm: bool,
}

pub(super) async fn look(config: &Config) -> Engines {
    let kvm = engine::probe_kvm().await;
    let accel = if kvm.works() { Accel::Kvm } else { Accel::Tcg };
    let found = engine::find_parts(config, &Layout::kernels_in(&config.data_dir), accel).await;
    judge(&config.engine, &kvm, found).await
}

async fn judge(config: &EngineConfig, kvm: &Kvm, found: Found) -> Engines {
    let weight = Weight::of(config.kind, kvm);
    let mut findings = vec![device(config, kvm), qemu(weight, &found.qemu)];
    findings.push(kernel(weight, &found.kernel));
    let chosen = match lean(config, async || kvm.clone()).await {
        Ok(Leaning::Gvisor(reason)) => Ok((Choice::Gvisor, reason)),
        Ok(Leaning::Microvm(_)) => settle(config.kind, found),
        Err(reason) => Err(reason),
    };
    let gvisor = matches!(chosen, Ok((Choice::Gvisor, _)));
    findings.push(match chosen {
        Ok((choice, reason)) => {
            let auto = if config.kind == EngineKind::Auto { "auto takes " } else { "" };
            fine("engine", format!("{auto}{}: {reason}", choice.name()))
        }
        Err(reason) => failed("engine", reason, "install what is missing, or set engine.kind"),
    });
    Engines { findings, gvisor, kvm: kvm.works() }
}

/// What it means if something for microVMs is missing.
#[derive(Debug, Clone, Copy)]
enum Weight {
    /// Nobody asked for them, and they would not work anyway.
    News,
    /// They would be had with it.
    Loss,
    /// They were asked for.
    Defect,
}

impl Weight {
    fn of(kind: EngineKind, kvm: &Kvm) -> Self {
        match kind {
            EngineKind::Microvm => Self::Defect,
            EngineKind::Auto if kvm.works() => Self::Loss,
            EngineKind::Auto | EngineKind::Gvisor => Self::News,
        }
    }

    fn finding(self, name: &'static str, detail: String, remedy: &str) -> Finding {
        match self {
            Self::News => fine(name, format!("{detail}; only microVMs need it")),
            Self::Loss => warned(name, detail, remedy),
            Self::Defect => failed(name, detail, remedy),
        }
    }
}

fn device(config: &EngineConfig, kvm: &Kvm) -> Finding {
    let (name, seen) = ("/dev/kvm", kvm.to_string());
    match (kvm.remedy(), config.kind) {
        (None, EngineKind::Auto | EngineKind::Gvisor | EngineKind::Microvm) => fine(name, seen),
        (Some(_), EngineKind::Auto | EngineKind::Gvisor) => {
            fine(name, format!("{seen}; only microVMs need it"))
        }
        (Some(remedy), EngineKind::Microvm) if config.emulate => {
            warned(name, format!("{seen}; processors are emulated, many times slower"), remedy)
        }
        (Some(remedy), EngineKind::Microvm) => failed(name, seen, remedy),
    }
}

fn qemu(weight: Weight, found: &Result<Build, BuildError>) -> Finding {
    let remedy = "install QEMU 10 or newer (`scripts/setup --microvm` does on Debian), or set \
                  engine.qemu_path";
    match found {
        Ok(build) => fine("QEMU", format!("{} at {}", build.text, build.program.display())),
        Err(BuildError::Missing { program, source })
            if source.kind() == io::ErrorKind::NotFound =>
        {
            weight.finding("QEMU", format!("{} is not there", program.display()), remedy)
        }
        Err(error) => weight.finding("QEMU", chain(error), remedy),
    }
}

fn kernel(weight: Weight, found: &Result<Kernel, KernelError>) -> Finding {
    match found {
        Ok(kernel) => fine("kernel", format!("{} for microVMs", kernel.release)),
        Err(error) => {
            let hint = error.hint().unwrap_or_else(|| "get one with: torpor kernel fetch".into());
            weight.finding("kernel", chain(error), &hint)
        }
    }
}

#[cfg(test)]
mod tests {
    use torpor_engines::probe::Verdict;

    use super::*;

    fn config(kind: EngineKind, emulate: bool) -> EngineConfig {
        EngineConfig { kind, emulate, ..EngineConfig::default() }
    }

    fn nothing() -> Found {
        let qemu = Err(BuildError::TooOld { text: "7.2.22".into() });
        Found { qemu, kernel: Err(KernelError::None) }
    }

    /// Of /dev/kvm, QEMU, the kernel and the engine.
    async fn verdicts(config: EngineConfig, kvm: Kvm) -> (Vec<Verdict>, bool) {
        let engines = judge(&config, &kvm, nothing()).await;
        let names: Vec<_> = engines.findings.iter().map(|finding| finding.name).collect();
        assert_eq!(names, ["/dev/kvm", "QEMU", "kernel", "engine"]);
        for finding in &engines.findings {
            assert_eq!(finding.remedy.is_none(), finding.verdict == Verdict::Ok, "{finding:?}");
        }
        (engines.findings.iter().map(|finding| finding.verdict).collect(), engines.gvisor)
    }

    #[tokio::test]
    async fn a_host_for_gvisor_lacks_nothing() {
        for kind in [EngineKind::Auto, EngineKind::Gvisor] {
            for kvm in [Kvm::Absent, Kvm::Broken("x".into())] {
                assert_eq!(verdicts(config(kind, false), kvm).await, (vec![Verdict::Ok; 4], true));
            }
        }
    }

    #[tokio::test]
    async fn where_kvm_works_auto_tells_what_else_microvms_would_take() {
        use Verdict::{Ok, Warn};
        let found = verdicts(config(EngineKind::Auto, false), Kvm::Works).await;
        assert_eq!(found, (vec![Ok, Warn, Warn, Ok], true));
    }

    #[tokio::test]
    async fn microvms_that_were_asked_for_and_can_not_be_had_are_a_failure() {
        let found = verdicts(config(EngineKind::Microvm, false), Kvm::Absent).await;
        assert_eq!(found, (vec![Verdict::Fail; 4], false));
    }

    #[tokio::test]
    async fn emulation_is_never_taken_for_health() {
        use Verdict::{Fail, Warn};
        let found = verdicts(config(EngineKind::Microvm, true), Kvm::Absent).await;
        assert_eq!(found, (vec![Warn, Fail, Fail, Fail], false));
    }

    #[tokio::test]
    async fn an_old_qemu_is_named_with_the_reason_and_the_remedy() {
        let config = config(EngineKind::Microvm, false);
        let engines = judge(&config, &Kvm::Works, nothing()).await;
        let qemu = engines.findings.iter().find(|finding| finding.name == "QEMU").unwrap();
        assert!(qemu.detail.contains("7.2.22") && qemu.detail.contains("corrupt"), "{qemu:?}");
        assert!(qemu.remedy.as_ref().unwrap().contains("scripts/setup --microvm"), "{qemu:?}");
    }
}
