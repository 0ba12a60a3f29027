//! Stopping, saving and reviving.

use std::fs::File;
use std::os::unix::fs::FileExt;

use torpor_qemu::monitor::MonitorError;

use crate::machine::{MEMORY_MIB, Place};

#[tokio::test]
async fn a_stopped_guest_stands_still_until_it_is_resumed() {
    let Some(place) = Place::find().await else { return };
    let machine = place.boot("a");
    let mut monitor = machine.monitor().await;
    machine.counts_past(0).await;
    monitor.stop().await.unwrap();
    let count = machine.counter();
    // Time for a guest that goes on.
    monitor.save_state().await.unwrap();
    assert_eq!(machine.counter(), count);
    monitor.resume().await.unwrap();
    machine.counts_past(count).await;
}

#[tokio::test]
async fn a_saved_machine_is_revived_by_another_qemu_where_it_was() {
    let Some(place) = Place::find().await else { return };
    let machine = place.boot("a");
    let mut monitor = machine.monitor().await;
    machine.counts_past(0).await;
    monitor.stop().await.unwrap();
    let state = monitor.save_state().await.unwrap();
    let (memory, count) = (machine.memory(), machine.counter());
    monitor.resume().await.unwrap();
    // The first goes on as if nothing had been.
    machine.counts_past(count).await;
    drop((monitor, machine));

    for name in ["b", "c"] {
        let machine = place.revive(name, &memory);
        let mut monitor = machine.monitor().await;
        monitor.load_state(&state).await.unwrap();
        assert_eq!(machine.counter(), count);
        monitor.resume().await.unwrap();
        machine.counts_past(count).await;
        // What it writes is its own: the file behind its memory is as it was.
        let file = File::open(place.directory.path().join(format!("{name}.memory"))).unwrap();
        let mut now = vec![0; usize::try_from(MEMORY_MIB << 20).unwrap()];
        file.read_exact_at(&mut now, 0).unwrap();
        assert!(now == memory, "the memory file was changed");
        // And a revived machine can be saved like any other.
        monitor.stop().await.unwrap();
        assert!(!monitor.save_state().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_state_that_is_none_is_refused_with_qemus_words() {
    let Some(place) = Place::find().await else { return };
    let memory = vec![0; usize::try_from(MEMORY_MIB << 20).unwrap()];
    for state in [&b"nonsense, and nothing else"[..], b""] {
        let machine = place.revive("a", &memory);
        let mut monitor = machine.monitor().await;
        let error = monitor.load_state(state).await.unwrap_err();
        assert!(matches!(error, MonitorError::NotLoaded { .. }), "{error:?}");
    }
}
