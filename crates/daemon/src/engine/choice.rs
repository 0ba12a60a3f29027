//! The choice of an engine: a rule, apart from looking around.
//!
//! - `auto` never takes microVMs without a KVM that works: gVisor is faster than an emulated processor.
//! - What was asked for by name is had or refused, never replaced.

use torpor_engines::probe::kvm::Kvm;
use torpor_kernel::{Kernel, KernelError};
use torpor_lifecycle::chain;
use torpor_qemu::build::{Accel, Build, BuildError};

use crate::config::{EngineConfig, EngineKind};

/// What KVM alone decides.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Leaning {
    /// With the reason.
    Gvisor(String),
    /// If all its parts are there.
    Microvm(Accel),
}

/// An engine that can be opened.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    Gvisor,
    Microvm(Box<Parts>),
}

impl Choice {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Gvisor => "gvisor",
            Self::Microvm(_) => "microvm",
        }
    }
}

/// What a microVM is made of.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) qemu: Build,
    pub(crate) kernel: Kernel,
}

/// What there is of it, or why not.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) qemu: Result<Build, BuildError>,
    pub(crate) kernel: Result<Kernel, KernelError>,
}

/// The first half of the choice. `kvm` is asked only if it matters.
pub(crate) async fn lean(
    config: &EngineConfig,
    kvm: impl AsyncFnOnce() -> Kvm,
) -> Result<Leaning, String> {
    if config.kind == EngineKind::Gvisor {
        return Ok(Leaning::Gvisor("it is configured".into()));
    }
    let kvm = kvm().await;
    let Some(remedy) = kvm.remedy() else { return Ok(Leaning::Microvm(Accel::Kvm)) };
    match config.kind {
        EngineKind::Gvisor | EngineKind::Auto => {
            Ok(Leaning::Gvisor(format!("microVMs need KVM; /dev/kvm is {kvm}")))
        }
        EngineKind::Microvm if config.may_emulate() => Ok(Leaning::Microvm(Accel::Tcg)),
        EngineKind::Microvm => Err(format!(
            "microVMs need KVM; /dev/kvm is {kvm}; {remedy}; or choose gvisor with engine.kind \
             (engine.emulate does without KVM, many times slower: for tests)"
        )),
    }
}

/// The second half, with the reason in words.
pub(crate) fn settle(kind: EngineKind, found: Found) -> Result<(Choice, String), String> {
    let missing = match (found.qemu, found.kernel) {
        (Ok(qemu), Ok(kernel)) => {
            let reason = match (kind, qemu.accel) {
                (_, Accel::Tcg) => "it is configured, and so is emulation: SLOW, for tests only",
                (EngineKind::Microvm, Accel::Kvm) => "it is configured, and KVM works",
                (EngineKind::Auto | EngineKind::Gvisor, Accel::Kvm) => {
                    "KVM works, and QEMU and a kernel are there"
                }
            };
            return Ok((Choice::Microvm(Box::new(Parts { qemu, kernel })), reason.into()));
        }
        (Err(qemu), Ok(_)) => chain(&qemu),
        (Ok(_), Err(kernel)) => with_hint(&kernel),
        (Err(qemu), Err(kernel)) => format!("{}; {}", chain(&qemu), with_hint(&kernel)),
    };
    match kind {
        EngineKind::Auto | EngineKind::Gvisor => {
            Ok((Choice::Gvisor, format!("KVM works, but not all for microVMs is there: {missing}")))
        }
        EngineKind::Microvm => Err(missing),
    }
}

fn with_hint(error: &KernelError) -> String {
    match error.hint() {
        Some(hint) => format!("{} ({hint})", chain(error)),
        None => chain(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(kind: EngineKind, emulate: bool) -> EngineConfig {
        EngineConfig { kind, emulate, ..EngineConfig::default() }
    }

    fn broken() -> Kvm {
        Kvm::Broken("it could not count".into())
    }

    fn bad() -> [Kvm; 4] {
        [Kvm::Absent, Kvm::Denied, broken(), Kvm::Slow { instructions_per_sec: 1 }]
    }

    fn found(accel: Accel) -> Found {
        let qemu = Build {
            program: "/usr/bin/qemu".into(),
            version: (10, 0, 2),
            text: "10.0.2".into(),
            accel,
            firmware: "/qboot.rom".into(),
            libraries: Vec::new(),
            tick_khz: None,
        };
        let kernel = Kernel {
            release: "6.12".into(),
            id: "1".into(),
            vmlinux: "/vmlinux".into(),
            modules: Vec::new(),
        };
        Found { qemu: Ok(qemu), kernel: Ok(kernel) }
    }

    #[tokio::test]
    async fn gvisor_by_name_does_not_even_look_at_kvm() {
        let gvisor = config(EngineKind::Gvisor, true);
        let leaning = lean(&gvisor, async || panic!("it was asked")).await;
        assert!(matches!(leaning, Ok(Leaning::Gvisor(_))), "{leaning:?}");
    }

    #[tokio::test]
    async fn auto_takes_microvms_only_where_kvm_works() {
        let auto = config(EngineKind::Auto, false);
        assert_eq!(lean(&auto, async || Kvm::Works).await, Ok(Leaning::Microvm(Accel::Kvm)));
        for kvm in bad() {
            let said = kvm.to_string();
            let Ok(Leaning::Gvisor(reason)) = lean(&auto, async || kvm).await else {
                panic!("not gvisor: {said}")
            };
            assert!(reason.contains(&said), "{reason}");
        }
    }

    #[tokio::test]
    async fn auto_never_emulates_even_if_that_is_allowed() {
        let leaning = lean(&config(EngineKind::Auto, true), async || broken()).await;
        assert!(matches!(leaning, Ok(Leaning::Gvisor(_))), "{leaning:?}");
    }

    #[tokio::test]
    async fn microvms_by_name_are_refused_without_kvm_with_what_was_found_and_what_to_do() {
        for kvm in bad() {
            let (said, remedy) = (kvm.to_string(), kvm.remedy().unwrap());
            let refused = lean(&config(EngineKind::Microvm, false), async || kvm).await;
            let reason = refused.unwrap_err();
            for part in [&said, remedy, "engine.kind", "engine.emulate"] {
                assert!(reason.contains(part), "{reason} does not say {part}");
            }
        }
    }

    #[tokio::test]
    async fn emulation_is_used_only_where_kvm_does_not_work() {
        let microvm = config(EngineKind::Microvm, true);
        assert_eq!(lean(&microvm, async || broken()).await, Ok(Leaning::Microvm(Accel::Tcg)));
        assert_eq!(lean(&microvm, async || Kvm::Works).await, Ok(Leaning::Microvm(Accel::Kvm)));
    }

    #[test]
    fn all_parts_together_are_a_microvm_and_emulation_is_never_silent() {
        let (choice, _) = settle(EngineKind::Auto, found(Accel::Kvm)).unwrap();
        assert_eq!(choice.name(), "microvm");
        let (choice, reason) = settle(EngineKind::Microvm, found(Accel::Tcg)).unwrap();
        assert_eq!(choice.name(), "microvm");
        assert!(reason.contains("SLOW"), "{reason}");
    }

    #[test]
    fn a_missing_part_makes_auto_take_gvisor_and_say_which() {
        let found = Found { kernel: Err(KernelError::None), ..found(Accel::Kvm) };
        let (choice, reason) = settle(EngineKind::Auto, found).unwrap();
        assert_eq!(choice, Choice::Gvisor);
        assert!(reason.contains("no kernel") && reason.contains("torpor kernel fetch"), "{reason}");
    }

    #[test]
    fn a_missing_part_is_a_refusal_where_microvms_were_asked_for() {
        let qemu = Err(BuildError::TooOld { text: "7.2.22".into() });
        let found = Found { qemu, kernel: Err(KernelError::None) };
        let reason = settle(EngineKind::Microvm, found).unwrap_err();
        assert!(reason.contains("7.2") && reason.contains("torpor kernel fetch"), "{reason}");
    }
}
