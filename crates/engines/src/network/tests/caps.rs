//! How much a guest may do.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;
use torpor_protocol::{Network as Policy, NetworkLimits};

use super::super::names::{GATEWAY, Names, far_link};
use super::super::namespace::Namespace;
use super::verbs::{Doorkeeper, policy, proxied, reaches, says};
use super::world::{ELSEWHERE, PUBLIC, Place, eventually, fresh_tag, greeting, ip, on_a_host};

const ON: Policy = Policy::OPEN;
const NONE: NetworkLimits =
    NetworkLimits { bytes_per_sec: None, connections_per_sec: None, connections: None };
/// Of bytes: far from what a busy host can do.
const RATE: u64 = 2_000_000;

fn limited(policy: Policy, limits: NetworkLimits) -> Policy {
    Policy { limits, ..policy }
}

fn connections(count: u32) -> NetworkLimits {
    NetworkLimits { connections: Some(count), ..NONE }
}

/// `None` if it is refused.
fn opened(guest: &Place) -> Option<TcpStream> {
    let stream = guest.connect(PUBLIC);
    stream.map_err(|error| assert_eq!(error.kind(), ErrorKind::ConnectionRefused)).ok()
}

// === Bytes ===

/// Sends for ever, and counts what arrives.
fn pump(mut from: TcpStream, mut to: TcpStream) -> Arc<AtomicU64> {
    let counter = Arc::new(AtomicU64::new(0));
    std::thread::spawn(move || while from.write_all(&[7; 64 << 10]).is_ok() {});
    let count = counter.clone();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = to.read(&mut buffer) {
            count.fetch_add(u64::try_from(length).expect("small"), Ordering::Relaxed);
        }
    });
    counter
}

/// The part of the cap that arrives, in hundredths, once the first burst is over.
async fn percent(counter: &AtomicU64) -> u64 {
    let past = |bytes: u64| async move {
        let arrived = || counter.load(Ordering::Relaxed);
        eventually("so much arrives", async || (arrived() >= bytes).then(arrived)).await
    };
    // The kernel grants a second's worth at once, and a little.
    let first = past(2 * RATE).await;
    let begun = Instant::now();
    let last = past(first + 4 * RATE).await;
    let millis = u64::try_from(begun.elapsed().as_millis()).expect("short");
    (last - first) * 1000 / millis * 100 / RATE
}

#[test]
fn a_guest_gets_the_bytes_of_its_cap_in_each_direction() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let bytes = NetworkLimits { bytes_per_sec: Some(RATE), ..NONE };
        let doorkeeper = Doorkeeper::new(network.egress_proxy());
        let listener = world.beyond().inside(|| TcpListener::bind((PUBLIC, 9001)));
        let listener = listener.expect("a server");
        let (mut guests, mut counters) = (Vec::new(), Vec::new());
        for policy in [ON, proxied()] {
            let slot = network.take(&limited(policy.clone(), bytes)).await.expect("a slot");
            let guest = network.guest(&slot);
            let pair = || {
                let near = guest.connect_to(PUBLIC, 9001).expect("connected");
                let led = || doorkeeper.arrived().expect("it arrived").0;
                let direct = || listener.accept().expect("connected").0;
                (near, if policy == ON { direct() } else { led() })
            };
            let ((near, far), (back, from)) = (pair(), pair());
            counters.extend([pump(near, far), pump(from, back)]);
            guests.push((slot, guest));
        }
        // All at once: each for itself.
        let rates = counters.iter().map(|counter| percent(counter));
        for rate in futures_util::future::join_all(rates).await {
            // A busy host is slower, and then catches up with what it was granted meanwhile.
            assert!((25..=150).contains(&rate), "{rate} % of the cap");
        }
    });
}

#[test]
fn what_a_capped_guest_sends_is_paced_and_what_others_send_is_not() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let mut network = world.network(&tag).await;
        let bytes = limited(ON, NetworkLimits { bytes_per_sec: Some(RATE), ..NONE });
        let paced = |slot: u16| {
            let parking = Namespace::ensure(&Names::new(&tag).expect("a tag")).expect("parking");
            let shown = parking.enter(|| Ok(ip(&format!("link show dev {}", far_link(slot)))));
            shown.expect("inside").contains("qdisc tbf")
        };
        let slot = network.take(&bytes).await.expect("a slot");
        let number = slot.number();
        assert!(paced(number));
        network.set_policy(&slot, &ON).await.expect("changed");
        assert!(!paced(number));
        network.set_policy(&slot, &bytes).await.expect("changed");
        // Also after a daemon that could not take it back.
        drop(slot);
        for crash in [false, true] {
            if crash {
                network.crash();
                network = world.network(&tag).await;
            }
            let slot = eventually("the slot comes back", async || {
                let slot = network.take(&ON).await.expect("a slot");
                (slot.number() == number).then_some(slot)
            })
            .await;
            assert!(!paced(number));
            network.set_policy(&slot, &bytes).await.expect("changed");
            assert!(paced(number));
        }
    });
}

#[test]
fn the_largest_and_the_smallest_caps_are_taken() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        for (bytes, count, reached) in
            [(u64::MAX, u32::MAX, true), (10_000_000_000, 1, true), (1, 1, true), (0, 0, false)]
        {
            let limits = NetworkLimits {
                bytes_per_sec: Some(bytes),
                connections_per_sec: Some(count),
                connections: Some(count),
            };
            let slot = network.take(&limited(ON, limits)).await.expect("a slot");
            if reached {
                assert!(reaches(&network.guest(&slot), PUBLIC), "{limits:?}");
            }
        }
        let nothing = NetworkLimits { connections_per_sec: Some(0), ..NONE };
        for limits in [nothing, connections(0)] {
            let slot = network.take(&limited(ON, limits)).await.expect("a slot");
            assert!(!reaches(&network.guest(&slot), PUBLIC), "{limits:?}");
        }
    });
}

// === Connections ===

#[test]
fn a_guest_has_as_many_connections_as_its_cap_and_no_more() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        for policy in [ON, proxied(), policy(true, &["198.51.100.7"], &[])] {
            let doorkeeper = Doorkeeper::new(network.egress_proxy());
            let capped = limited(policy.clone(), connections(3));
            let slot = network.take(&capped).await.expect("a slot");
            let guest = network.guest(&slot);
            let mut streams: Vec<TcpStream> =
                (0..3).map(|_| opened(&guest).expect("connected")).collect();
            assert!(opened(&guest).is_none(), "{policy:?}");
            if policy == ON {
                guest.ask(GATEWAY, 53).expect("names are no connections");
            }
            streams.pop();
            // A connection is open until both ends are closed.
            while doorkeeper.arrived().is_some() {}
            streams.push(eventually("one more is let out", async || opened(&guest)).await);
            assert!(opened(&guest).is_none());
            let other = network.take(&capped).await.expect("a slot");
            assert!(opened(&network.guest(&other)).is_some(), "each counts for itself");
            network.set_policy(&slot, &policy).await.expect("changed");
            assert!(opened(&guest).is_some(), "without a cap");
        }
    });
}

#[test]
fn a_guest_opens_as_many_connections_in_a_second_as_its_cap() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let _doorkeeper = Doorkeeper::new(network.egress_proxy());
        let rate = NetworkLimits { connections_per_sec: Some(5), ..NONE };
        for policy in [ON, proxied()] {
            let slot = network.take(&limited(policy.clone(), rate)).await.expect("a slot");
            let guest = network.guest(&slot);
            let begun = Instant::now();
            let let_out = (0..50).filter(|_| opened(&guest).is_some()).count();
            let seconds = usize::try_from(begun.elapsed().as_secs()).expect("short") + 1;
            assert!((5..=5 + 5 * seconds).contains(&let_out), "{let_out} in {seconds} s");
            if policy == ON {
                guest.ask(GATEWAY, 53).expect("names are no connections");
            }
            eventually("its time comes again", async || opened(&guest)).await;
        }
    });
}

#[test]
fn caps_stay_while_daemons_come_and_go() {
    on_a_host(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let capped = limited(ON, connections(1));
        let slot = network.take(&capped).await.expect("a slot");
        let number = slot.number();
        let guest = network.guest(&slot);
        let _first = opened(&guest).expect("connected");
        assert!(opened(&guest).is_none());
        network.crash();
        drop(slot);
        // From here to the adoption nothing awaits, so nobody looks for users of the slot, of which
        // this guest, with a kernel of its own, is none.
        let network = world.network_with(&tag, &[(number, capped.clone())]).await;
        let mut second = opened(&guest).expect("the count begins anew");
        assert!(opened(&guest).is_none());
        let slot = network.adopt(number, &capped).await.expect("adopted");
        assert!(opened(&guest).is_none());
        // A lower cap holds for what comes; what is open goes on.
        network.set_policy(&slot, &limited(ON, connections(0))).await.expect("changed");
        assert!(!reaches(&guest, ELSEWHERE));
        greeting(&mut second).expect("a greeting");
        assert_eq!(says(&mut second), Ok(()));
        drop(slot);
    });
}
