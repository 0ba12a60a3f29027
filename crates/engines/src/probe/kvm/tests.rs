//! The verdict from made-up measurements, and the device of this host.

use std::sync::mpsc::channel;

use tokio::time::Instant;

use super::*;

/// What is promised and what a busy host may add; a device that is waited for takes for ever.
const LONG: Duration = PROBE_MAX.saturating_mul(5);

fn said(step: Step) -> Ran {
    ran(End::Said { port: step.port().into(), value: 1 }, 1)
}

fn ran(end: End, millis: u64) -> Ran {
    Ran { end, took: Duration::from_millis(millis) }
}

#[test]
fn a_guest_that_says_what_it_should_is_fine() {
    for step in Step::ALL {
        assert_eq!(judge(step, &said(step)), None, "{step:?}");
    }
}

#[test]
fn kvm_on_an_emulated_processor_is_fast_enough_even_when_busy() {
    let said = said(Step::Race).end;
    assert_eq!(judge(Step::Race, &ran(said.clone(), 15)), None);
    assert_eq!(judge(Step::Race, &ran(said, 140)), None);
}

#[test]
fn an_instruction_it_does_not_know_is_named_with_the_reason() {
    let failed = ran(End::Failed("no idea".into()), 1);
    let Some(Kvm::Broken(reason)) = judge(Step::Exchange, &failed) else { panic!("not broken") };
    assert!(reason.contains("cmpxchg16b") && reason.contains("no idea"), "{reason}");
}

#[test]
fn counting_that_had_to_be_stopped_is_slow_and_says_how_slow() {
    let stopped = ran(End::Stopped { counted: 150_000 }, 150);
    let slow = Kvm::Slow { instructions_per_sec: 2_000_000 };
    assert!(slow.to_string().contains("2000 thousand instructions"), "{slow}");
    assert_eq!(judge(Step::WarmUp, &stopped), Some(slow.clone()));
    assert_eq!(judge(Step::Race, &stopped), Some(slow));
}

#[test]
fn counting_that_ended_too_late_is_slow() {
    let late = ran(said(Step::Race).end, 2_000);
    let slow = Kvm::Slow { instructions_per_sec: 2_000_000 };
    assert_eq!(judge(Step::Race, &late), Some(slow));
}

#[test]
fn a_guest_that_never_gets_anywhere_is_broken() {
    for step in [Step::Enter, Step::Exchange] {
        let stopped = ran(End::Stopped { counted: 0 }, 150);
        assert!(matches!(judge(step, &stopped), Some(Kvm::Broken(_))), "{step:?}");
    }
}

#[test]
fn a_wrong_word_or_a_wrong_value_is_broken() {
    let early = said(Step::Exchange);
    assert!(matches!(judge(Step::WarmUp, &early), Some(Kvm::Broken(_))));
    let unequal = ran(End::Said { port: Step::Exchange.port().into(), value: 0 }, 1);
    assert!(matches!(judge(Step::Exchange, &unequal), Some(Kvm::Broken(_))));
}

#[test]
fn only_what_works_needs_no_remedy() {
    assert_eq!(Kvm::Works.remedy(), None);
    let bad = [Kvm::Absent, Kvm::Denied, Kvm::Broken("x".into())];
    for kvm in bad.into_iter().chain([Kvm::Slow { instructions_per_sec: 1 }]) {
        assert!(kvm.remedy().is_some() && !kvm.works(), "{kvm:?}");
    }
}

/// A device that keeps the thread in the kernel, whatever is sent there.
#[test]
fn a_guest_that_can_not_be_stopped_is_left_behind() {
    let (release, held) = channel::<()>();
    let begun = Instant::now();
    let verdict = watch(Duration::from_millis(1), move |notes| {
        notes.send(Note::Running).unwrap();
        let _ = held.recv();
        Kvm::Works
    });
    assert_eq!(verdict, Kvm::Broken("a guest can't be stopped".into()));
    assert!(begun.elapsed() < LONG);
    drop(release);
}

#[test]
fn a_device_that_never_makes_a_machine_is_given_up() {
    let (release, held) = channel::<()>();
    let verdict = watch(Duration::from_millis(1), move |_| {
        let _ = held.recv();
        Kvm::Works
    });
    assert_eq!(verdict, Kvm::Broken("no machine could be made in 2 seconds".into()));
    drop(release);
}

#[test]
fn a_probe_that_dies_is_no_working_device() {
    let verdict = watch(Duration::from_millis(1), |_| panic!("on purpose"));
    assert!(matches!(verdict, Kvm::Broken(_)), "{verdict:?}");
}

#[test]
fn the_device_of_this_host_is_judged_alike_twice_and_in_time() {
    let judged = [0, 1].map(|_| {
        let begun = Instant::now();
        (probe(), begun.elapsed())
    });
    println!("{judged:?}");
    assert!(judged.iter().all(|(_, took)| *took < LONG), "{judged:?}");
    // How slow a slow one is differs each time, and so may the fault that is seen first on a busy host.
    let works = judged.each_ref().map(|(kvm, _)| kvm.works());
    assert_eq!(works[0], works[1], "{judged:?}");
    if !std::path::Path::new("/dev/kvm").exists() {
        assert_eq!(judged[0].0, Kvm::Absent);
    }
}

/// The same guest, but it counts for centuries.
#[test]
fn a_guest_that_never_ends_is_stopped_and_no_handler_is_needed() {
    let begun = Instant::now();
    let verdict = watch(Duration::from_millis(20), |notes| try_guest(notes, u64::MAX, 1));
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    match verdict {
        Kvm::Slow { instructions_per_sec } => assert!(instructions_per_sec > 0),
        Kvm::Absent | Kvm::Denied => torpor_testkit::not_here("/dev/kvm can't be opened"),
        // A device that enters no guest has none to stop.
        Kvm::Broken(_) => assert!(!probe().works(), "{verdict:?}"),
        Kvm::Works => panic!("{verdict:?}"),
    }
}
