//! Copies of one machine, and what it was before: promises of every engine that isolates.

use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use torpor_lifecycle::guest::Guest;
use torpor_protocol::guest::Request;

use crate::world::{Installation, boot, eventually, quiesce, revive, say, stage, unquiesce, world};

/// Draws from the kernel's randomness as fast as it can, and writes down what it drew. Not for ever, as
/// it is written into memory.
const DRAWER: &str = "(for ((i=0; i<200000; i++)); do echo $i-$SRANDOM-$SRANDOM-$SRANDOM; \
                      [ ! -e /dev/shm/enough ] || break; done > /dev/shm/drawn) & \
                      until [ -s /dev/shm/drawn ]; do :; done";

/// So much of what was drawn later is compared: some hundred lines.
const DRAWN: u64 = 4000;

/// One line may have been drawn before the save and written down after it; none is longer.
const IN_HAND: u64 = 64;

/// What the drawer of a machine drew, with enough after the first `from` bytes. It draws no more.
async fn drawn(guest: &Guest, from: u64) -> Vec<String> {
    let enough = from + DRAWN;
    let wait = format!(
        "until [ $(stat -c %s /dev/shm/drawn) -gt {enough} ]; do sleep 0.02; done; \
         touch /dev/shm/enough; head -c {enough} /dev/shm/drawn"
    );
    let mut lines: Vec<String> = say(guest, &wait).await.lines().map(str::to_owned).collect();
    lines.pop().expect("the last one may not be whole");
    lines
}

/// How much was drawn until now.
async fn drawn_so_far(guest: &Guest) -> u64 {
    let path = "/dev/shm/drawn".to_owned();
    guest.stat(&Request::Stat { path }).await.unwrap().size
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_never_draw_the_same_randomness_neither_old_processes_nor_new_ones() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    say(&guest, DRAWER).await;
    quiesce(&**world.engine(), &guest).await;
    let mut before = drawn_so_far(&guest).await;
    machine.save(save.path()).await.unwrap();
    unquiesce(&**world.engine(), &guest).await;
    // One that does not rest went on until it was saved, and had drawn no more by then than by now.
    let exact = world.engine().about().abilities.quiesces;
    if !exact {
        before = drawn_so_far(&guest).await;
    }
    let (one, two) = (world.plan(), world.plan());
    let ((one, in_one), (two, in_two)) =
        tokio::join!(revive(&world, &one, save.path()), revive(&world, &two, save.path()));
    let fresh = "head -c 16 /dev/urandom | od -An -tx1";
    let mut all = Vec::new();
    let mut words = HashSet::new();
    for guest in [&guest, &in_one, &in_two] {
        let lines = drawn(guest, before).await;
        assert!(words.insert(say(guest, fresh).await), "a new process draws what another drew");
        all.push(lines);
    }
    for (one, other) in [(0, 1), (0, 2), (1, 2)] {
        let common = all[one].iter().zip(&all[other]).take_while(|(a, b)| a == b).count();
        let bytes: usize = all[one][..common].iter().map(|line| line.len() + 1).sum();
        assert!(common > 0, "they have a past in common");
        let (bytes, least) = (bytes as u64, if exact { before } else { 0 });
        let most = before + IN_HAND;
        assert!((least..=most).contains(&bytes), "{bytes} in common, {before} when saved");
        let later: HashSet<&String> = all[one][common..].iter().collect();
        assert!(all[one].len() > common + 1 && all[other].len() > common + 1);
        assert!(all[other][common..].iter().all(|line| !later.contains(line)));
    }
    for machine in [machine, one, two] {
        machine.kill().await.unwrap();
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

fn seconds(text: &str) -> Duration {
    Duration::from_secs_f64(text.parse().unwrap_or_else(|_| panic!("{text} is no time")))
}

/// How far the guest's clock is from the host's: nothing, if what it says lies between two looks at
/// the host's.
async fn clock_error(guest: &Guest) -> Duration {
    let before = since_epoch();
    let inside = seconds(&say(guest, "echo $EPOCHREALTIME").await);
    let after = since_epoch();
    before.saturating_sub(inside).max(inside.saturating_sub(after))
}

/// For how long it runs, as its processes see it.
async fn uptime(guest: &Guest) -> Duration {
    let text = say(guest, "cat /proc/uptime").await;
    seconds(text.split(' ').next().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clock_is_right_after_a_save_a_pause_and_a_revive() {
    let Some(world) = world().await else { return };
    let slack = world.installed.clock_slack();
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    assert!(clock_error(&guest).await <= slack, "from the start");
    let up = uptime(&guest).await;
    world.save(&mut machine, &guest, save.path()).await;
    let saved = since_epoch();
    assert!(clock_error(&guest).await <= slack, "after a save");
    world.pause(&mut machine, &guest).await;
    // A clock that stood still would be behind by more than is allowed.
    eventually("time passes", || since_epoch() > saved + 3 * slack).await;
    world.resume(&mut machine, &guest).await;
    let error = clock_error(&guest).await;
    assert!(error <= slack, "after a pause: {error:?}");
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &world.plan(), save.path()).await;
    let error = clock_error(&guest).await;
    assert!(error <= slack, "after a revive: {error:?}");
    assert!(uptime(&guest).await >= up, "the other clock never goes back");
    machine.kill().await.unwrap();
}

/// One process answers another over TCP: a line before `go`, and one after it.
const CONVERSATION: &str = r#"
(perl -e '
    socket(L, 2, 1, 6) and bind(L, pack("Sna4x8", 2, 7777, "\x7f\0\0\x01")) and listen(L, 1) or die;
    open(F, ">", "/dev/shm/listens"); close(F);
    accept(C, L);
    while (sysread(C, $said, 100)) { syswrite(C, "re $said") }' >/dev/null 2>&1 &)
until [ -e /dev/shm/listens ]; do :; done
(
    exec 3<>/dev/tcp/127.0.0.1/7777
    echo one >&3; read -r answer <&3; echo "$answer" > /dev/shm/first
    until [ -e /dev/shm/go ]; do sleep 0.02; done
    echo two >&3; read -r answer <&3; echo "$answer" > /dev/shm/second
) >/dev/null 2>&1 &
until [ -s /dev/shm/first ]; do :; done; cat /dev/shm/first"#;

const GO_ON: &str =
    "touch /dev/shm/go; until [ -s /dev/shm/second ]; do sleep 0.02; done; cat /dev/shm/second";

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_between_two_processes_inside_survives_in_every_copy() {
    let Some(world) = world().await else { return };
    let save = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    assert_eq!(say(&guest, CONVERSATION).await, "re one");
    world.save(&mut machine, &guest, save.path()).await;
    let (one, two) = (world.plan(), world.plan());
    let ((one, in_one), (two, in_two)) =
        tokio::join!(revive(&world, &one, save.path()), revive(&world, &two, save.path()));
    for guest in [&guest, &in_one, &in_two] {
        assert_eq!(say(guest, GO_ON).await, "re two");
    }
    for machine in [machine, one, two] {
        machine.kill().await.unwrap();
    }
}
