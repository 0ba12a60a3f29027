//! Whose memory is whose: copies share what they do not write, and a machine that is paused writes
//! nothing.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use torpor_protocol::SandboxId;
use torpor_qemu::memory::{GuestMemory, Piece, bytes_of};
use torpor_qemu::unit;

use crate::processes::{COUNTER, GOES_ON};
use crate::world::{World, boot, greet, say, stage, unquiesce, world};

const MIB: u64 = 1 << 20;

/// What a copy usually has for itself when it begins, at most.
const BIRTH_USUAL: u64 = 1_000_000;
/// What none has: a guest runs while it is looked at, and writes more the longer that takes on a busy
/// host, but far less than the memory that it would have copied.
const BIRTH_MAX: u64 = 2 * MIB;

/// How much of its memory a guest has for itself.
fn private(world: &World, id: &SandboxId) -> u64 {
    let machine = world.machine_of(id).expect("it has a machine");
    let pid = world.records()[&machine]["process"]["pid"].as_i64().unwrap();
    let memory = File::open(world.config.scratch_dir.join(format!("{machine}.memory"))).unwrap();
    let memory = GuestMemory::of(i32::try_from(pid).unwrap(), &memory, 256 * MIB).unwrap();
    bytes_of(&memory.written().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_copies_have_hardly_any_memory_of_their_own_when_they_begin() {
    const COPIES: usize = 10;
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=8").await;
    world.save(&mut machine, &guest, save.path()).await;
    assert!(private(&world, &world.sandboxes()[0]) > 8 * MIB, "what a machine writes is its own");
    machine.kill().await.unwrap();
    let plans: Vec<_> = (0..COPIES).map(|_| world.plan()).collect();
    let (mut copies, mut own) = (Vec::new(), Vec::new());
    for plan in &plans {
        let machine = world.revive(plan, save.path()).await.unwrap();
        let guest = greet(machine.channel()).await;
        own.push(private(&world, &plan.id));
        unquiesce(&**world.engine(), &guest).await;
        copies.push((machine, guest));
    }
    own.sort_unstable();
    assert!(own[COPIES / 2] <= BIRTH_USUAL && own[COPIES - 1] <= BIRTH_MAX, "{own:?} bytes");
    for (machine, guest) in copies {
        assert_eq!(say(&guest, "stat -c %s /dev/shm/big").await, (8 * MIB).to_string());
        machine.kill().await.unwrap();
    }
}

/// The pages of a save that are not as the machine began, by what is in them; `None`: zeros.
fn pages(save: &Path) -> BTreeMap<u64, Option<blake3::Hash>> {
    let unit = unit::open(save).unwrap();
    let delta = unit.delta.expect("it wrote little");
    let mut pages = BTreeMap::new();
    delta
        .read(|piece| {
            match piece {
                Piece::Data { first_page, bytes } => {
                    pages.insert(first_page, Some(blake3::hash(bytes)));
                }
                Piece::Zero(run) => {
                    pages.insert(run.first_page, None);
                }
            }
            Ok(())
        })
        .unwrap();
    pages
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_executes_nothing_while_it_is_saved_and_afterwards() {
    let Some(world) = world().await else { return };
    let saves = [stage(), stage(), stage()];
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, COUNTER).await;
    // Without a word to the guest, which counts.
    machine.pause().await.unwrap();
    machine.save(saves[0].path()).await.unwrap();
    machine.save(saves[1].path()).await.unwrap();
    machine.resume().await.unwrap();
    say(&guest, GOES_ON).await;
    machine.pause().await.unwrap();
    machine.save(saves[2].path()).await.unwrap();
    machine.kill().await.unwrap();
    let pages = saves.each_ref().map(|save| pages(save.path()));
    assert!(!pages[0].is_empty());
    assert_eq!(pages[0], pages[1], "its memory changed between two saves");
    assert_ne!(pages[1], pages[2], "a guest that runs changes its memory");
}
