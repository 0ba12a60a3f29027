//! Network cards of microVMs: what goes out and in through them, and whose they are.

use std::fs::File;
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::Instant;
use torpor_protocol::{Network as Policy, NetworkLimits};

use super::super::names::{FAR_MAC, GUEST, card_link, far_link};
use super::super::{NetworkError, Slot, Tap, card, remove_traces};
use super::world::{
    DATAGRAM_PORT, HOST, Opened, PUBLIC, World, close, datagram, eventually, fresh_tag, ip,
    on_a_host,
};

const ON: Policy = Policy::OPEN;

/// Runs a test on a host whose kernel has cards.
fn with_cards(test: impl AsyncFnOnce(&World) + Send) {
    on_a_host(async |world| {
        let mut ip = Command::new("ip");
        let try_one = "link add link up0 name try0 type macvtap mode passthru";
        ip.env("PATH", crate::program::search_path()).args(try_one.split(' '));
        if !ip.status().expect("ip runs").success() {
            torpor_testkit::not_here("this kernel has no macvtap");
            return;
        }
        super::world::ip("link del try0");
        test(world).await;
    });
}

/// A network card in the hands of a program.
struct Card(File);

impl Card {
    fn open(path: &Path) -> Self {
        let file = File::options().read(true).write(true).open(path).expect("the device");
        Self(file)
    }

    /// A new one of the slot, at the kernel's node.
    async fn new(network: &Opened, slot: &Slot) -> (Self, Tap) {
        network.wait_for_both_ends(slot);
        let tap = slot.tap().await.expect("a card");
        (Self::open(&tap.path), tap)
    }

    fn send(&mut self, frame: &[u8]) {
        assert_eq!(self.0.write(frame).expect("sent"), frame.len());
    }

    /// Whether the kernel knows no card any more that this would be.
    #[expect(unsafe_code, reason = "questions to such devices have no safe wrapper")]
    fn is_dead(&self) -> bool {
        let mut about = [0_u8; size_of::<libc::ifreq>()];
        // SAFETY: the kernel writes a whole `ifreq` at the pointer, for which there is room.
        let asked = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TUNGETIFF, &raw mut about) };
        asked == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOLINK)
    }

    /// The next frame, with the header before it.
    fn next(&mut self) -> Vec<u8> {
        let patience = Timespec { tv_sec: 5, tv_nsec: 0 };
        let mut wanted = [PollFd::new(&self.0, PollFlags::IN)];
        assert_eq!(poll(&mut wanted, Some(&patience)).expect("polled"), 1, "nothing arrives");
        let mut frame = vec![0; 2000];
        let length = self.0.read(&mut frame).expect("a frame");
        frame.truncate(length);
        frame
    }
}

fn inode(path: &Path) -> Option<u64> {
    path.metadata().map(|about| about.ino()).ok()
}

/// Whether the parking namespace has a card for this slot.
fn has_card(network: &Opened, slot: u16) -> bool {
    let name = format!(" {}@", card_link(slot));
    network.parking().enter(|| Ok(ip("link show").contains(&name))).expect("inside")
}

fn send_to_guest(slot: &Slot, text: &[u8]) {
    let host = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    host.send_to(text, (slot.address(), 9)).expect("sent");
}

async fn comes_back(network: &Opened, number: u16) -> Slot {
    eventually("the slot comes back", async || {
        let slot = network.take(&ON).await.expect("a slot");
        (slot.number() == number).then_some(slot)
    })
    .await
}

#[test]
fn frames_go_out_through_the_firewall_and_answers_come_in() {
    with_cards(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let (mut card, _) = Card::new(&network, &slot).await;
        card.send(&datagram(HOST, PUBLIC, b"under a false name"));
        card.send(&datagram(GUEST, PUBLIC, b"hello"));
        let mut text = [0; 100];
        let (length, caller) = server.recv_from(&mut text).expect("a datagram");
        assert_eq!(&text[..length], b"hello", "and nothing before");
        assert_eq!(caller.ip(), HOST, "it is hidden behind the host");
        server.send_to(b"hello back", caller).expect("sent");
        let frame = card.next();
        assert!(frame.ends_with(b"hello back"));
        // Ten bytes of header, then the frame: to the guest, from the gateway, to 10.0.0.2.
        let link = slot.link();
        assert_eq!(frame[10..16], link.mac);
        assert_eq!(frame[16..22], link.gateway_mac);
        assert_eq!(frame[10 + 14 + 16..10 + 14 + 20], link.address.octets());
    });
}

#[test]
fn what_the_policy_forbids_is_refused_and_the_rest_is_not() {
    with_cards(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&Policy::CLOSED).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let (mut card, _) = Card::new(&network, &slot).await;
        card.send(&datagram(GUEST, PUBLIC, b"forbidden"));
        let refusal = card.next();
        // Of IP: ICMP; of ICMP: unreachable, as the administrator will have it.
        assert_eq!((refusal[10 + 14 + 9], &refusal[10 + 34..10 + 36]), (1, &[3, 13][..]));
        network.set_policy(&slot, &ON).await.expect("changed");
        card.send(&datagram(GUEST, PUBLIC, b"allowed"));
        let mut text = [0; 100];
        let length = server.recv(&mut text).expect("a datagram");
        assert_eq!(&text[..length], b"allowed", "and nothing before");
    });
}

#[test]
fn what_is_too_much_for_the_cap_is_late_and_not_lost() {
    with_cards(async |world| {
        let network = world.network(&fresh_tag()).await;
        // The firewall alone would let through a multiple of what is sent here at once.
        let bytes_per_sec = Some(20_000);
        let limits = NetworkLimits { bytes_per_sec, connections_per_sec: None, connections: None };
        let slot = network.take(&Policy { limits, ..ON }).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let (mut card, _) = Card::new(&network, &slot).await;
        let begun = Instant::now();
        for number in 0..30 {
            card.send(&datagram(GUEST, PUBLIC, &[number; 1200]));
        }
        for number in 0..30 {
            let mut text = [0; 2000];
            assert_eq!(server.recv(&mut text).expect("all arrive"), 1200);
            assert_eq!(text[0], number, "in order");
        }
        // 36 kB, of which 16 go at once.
        assert!(begun.elapsed() > Duration::from_millis(800), "{:?}", begun.elapsed());
    });
}

#[test]
fn a_card_carries_what_the_slot_carries() {
    with_cards(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let (mut card, tap) = Card::new(&network, &slot).await;
        let shown =
            network.parking().enter(|| Ok(ip("-d link show type macvtap"))).expect("inside");
        let mtu = format!("mtu {}", slot.link().mtu);
        assert!(shown.contains(&mtu) && shown.contains("passthru"), "{shown}");
        assert_eq!(tap.path.to_str(), Some(format!("/dev/tap{}", shown_index(&shown)).as_str()));
        let largest = [7; 1400 - 28];
        send_to_guest(&slot, &largest);
        assert!(card.next().ends_with(&largest));
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        card.send(&datagram(GUEST, PUBLIC, &largest));
        assert_eq!(server.recv(&mut [0; 2000]).expect("a datagram"), largest.len());
    });
}

fn shown_index(shown: &str) -> &str {
    shown.split(':').next().expect("a number")
}

#[test]
fn a_slot_is_handed_on_when_its_card_is_closed_and_then_has_none() {
    with_cards(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&Policy::CLOSED).await.expect("a slot");
        let number = slot.number();
        network.wait_for_both_ends(&slot);
        let tap = slot.tap().await.expect("a card");
        // As on a host where the kernel makes no devices, or has one of that name that is no card.
        std::fs::remove_file(&tap.path).expect("the kernel's");
        std::fs::write(&tap.path, "").expect("a file");
        card::place(&tap.path, tap.device).expect("our own");
        card::place(&tap.path, tap.device).expect("it is there");
        let mut card = Card::open(&tap.path);
        send_to_guest(&slot, b"for the former owner");
        assert!(card.next().ends_with(b"for the former owner"));
        drop(slot);
        let mut held = Vec::new();
        for _ in 0..30 {
            held.push(network.take(&ON).await.expect("a slot"));
        }
        assert!(held.iter().all(|slot| slot.number() != number));
        assert!(has_card(&network, number));
        drop(card);
        let slot = comes_back(&network, number).await;
        assert!(!has_card(&network, number) && !tap.path.exists());
        let far = network.parking().enter(|| Ok(ip(&format!("-d link show {}", far_link(number)))));
        let far = far.expect("inside");
        let mac = FAR_MAC.map(|byte| format!("{byte:02x}")).join(":");
        assert!(far.contains("promiscuity 0") && far.contains(&mac), "{far}");
        let socket = network.card(&slot);
        send_to_guest(&slot, b"for another engine");
        assert!(super::world::read(socket).ends_with(b"for another engine"));
    });
}

#[test]
fn a_new_card_is_the_only_one() {
    with_cards(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&ON).await.expect("a slot");
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        let (mut former, _) = Card::new(&network, &slot).await;
        send_to_guest(&slot, b"of earlier times");
        assert!(!former.is_dead());
        let (mut card, _) = Card::new(&network, &slot).await;
        assert!(former.is_dead());
        former.send(&datagram(GUEST, PUBLIC, b"from the past"));
        card.send(&datagram(GUEST, PUBLIC, b"from the present"));
        let mut text = [0; 100];
        let length = server.recv(&mut text).expect("a datagram");
        assert_eq!(&text[..length], b"from the present", "and nothing before");
        send_to_guest(&slot, b"the first packet");
        assert!(card.next().ends_with(b"the first packet"));
    });
}

#[test]
fn the_card_of_a_machine_that_outlives_a_daemon_stays_and_that_of_a_dead_one_goes() {
    with_cards(async |world| {
        let tag = fresh_tag();
        let network = world.network(&tag).await;
        let (living, dead) = (network.take(&ON).await, network.take(&ON).await);
        let (living, dead) = (living.expect("a slot"), dead.expect("a slot"));
        let (number, dead_number) = (living.number(), dead.number());
        let (mut card, _) = Card::new(&network, &living).await;
        let (dead_card, _) = Card::new(&network, &dead).await;
        drop((living, dead));
        network.crash();
        drop(dead_card);
        let network = world.network_with(&tag, &[(number, ON), (dead_number, ON)]).await;
        network.swept(&[number, dead_number]);
        drop(comes_back(&network, dead_number).await);
        assert!(!has_card(&network, dead_number));
        let slot = network.adopt(number, &ON).await.expect("adopted");
        send_to_guest(&slot, b"still here");
        assert!(card.next().ends_with(b"still here"));
        let server = world.beyond().listen(PUBLIC, DATAGRAM_PORT);
        card.send(&datagram(GUEST, PUBLIC, b"still here too"));
        server.recv(&mut [0; 100]).expect("a datagram");
        // Its time comes as well.
        drop((slot, card));
        drop(comes_back(&network, number).await);
        assert!(!has_card(&network, number));
        close(network).await.expect("closed");
    });
}

#[test]
fn a_closed_network_leaves_no_cards_and_others_keep_theirs() {
    with_cards(async |world| {
        let (tag, other) = (fresh_tag(), fresh_tag());
        for crash in [false, true] {
            let network = world.network(&tag).await;
            let slot = network.take(&ON).await.expect("a slot");
            let (card, tap) = Card::new(&network, &slot).await;
            let node = inode(&tap.path).expect("a device");
            let neighbour = world.network(&other).await;
            let neighbours_slot = neighbour.take(&ON).await.expect("a slot");
            let (mut neighbours, other_tap) = Card::new(&neighbour, &neighbours_slot).await;
            assert_ne!((tap.device, &tap.path), (other_tap.device, &other_tap.path));
            assert!(other_tap.path.exists() && !card.is_dead());
            if crash {
                network.crash();
                remove_traces(&tag).await.expect("removed");
            } else {
                network.close().await.expect("closed");
                let closed = slot.tap().await.expect_err("it is closed");
                assert!(matches!(closed, NetworkError::Closed));
                network.crash();
            }
            // Its number, and so the name of its device, may have a new owner already.
            assert_ne!(inode(&tap.path), Some(node));
            eventually("the card dies", async || card.is_dead().then_some(())).await;
            send_to_guest(&neighbours_slot, b"the other works on");
            assert!(neighbours.next().ends_with(b"the other works on"));
            drop((neighbours, neighbours_slot));
            close(neighbour).await.expect("closed");
        }
    });
}
