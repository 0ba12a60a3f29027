//! Where machines are to run with KVM: that it works, and that it is KVM that runs them.

use torpor_engines::probe::kvm::{Kvm, probe};
use torpor_qemu::build::Accel;

use super::accel;
use super::jail::{files, qemu};
use crate::world::{boot, say, world};

/// Whether the tests are about KVM; says so if they are not.
fn asked_for() -> bool {
    let asked = accel() == Accel::Kvm;
    if !asked {
        torpor_testkit::not_here("machines are emulated here: see scripts/kvm-test");
    }
    asked
}

#[test]
fn the_probe_finds_that_kvm_works() {
    if asked_for() {
        assert_eq!(probe(), Kvm::Works);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_run_on_the_processor_and_their_kernels_know_it() {
    if !asked_for() {
        return;
    }
    let world = world().await.expect("this host was chosen for it");
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let files = files(&qemu(&world, &plan.id));
    assert!(files.iter().any(|file| file.contains("kvm-vcpu")), "{files:?}");
    let clocks = "cat /sys/devices/system/clocksource/clocksource0/available_clocksource";
    let clocks = say(&guest, clocks).await;
    assert!(clocks.contains("kvm-clock"), "{clocks}");
    let version = &world.engine().about().version;
    assert!(version.contains(", kvm, processor host ("), "{version}");
    machine.kill().await.unwrap();
}
