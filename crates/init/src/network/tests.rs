//! What the card is told, as bytes of the kernel.

use std::process::Command;

use rustix::thread::UnshareFlags;

use super::*;

#[test]
fn the_largest_packet_is_a_word_of_the_command_line() {
    assert_eq!(mtu("quiet torpor.mtu=1450 panic=-1\n"), Some(1450));
    for line in ["", "quiet", "mtu=1450", "torpor.mtu=", "torpor.mtu=67", "torpor.mtu=70000"] {
        assert_eq!(mtu(line), None, "{line}");
    }
}

/// Does it in a network of its own, which ends with its thread. None without root.
#[expect(unsafe_code, reason = "a network of one thread")]
fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("only root can make a network");
        return None;
    }
    let there = || {
        // SAFETY: only this thread changes its network, and it has no descriptors of another.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        work()
    };
    Some(std::thread::scope(|scope| scope.spawn(there).join().unwrap()))
}

fn ip(words: &str) -> String {
    let output = Command::new("ip").args(words.split(' ')).output().unwrap();
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_machine_has_its_address_its_route_and_its_neighbour() {
    elsewhere(|| {
        ip("link add eth0 type veth peer name far");
        set_up(Some(1400)).unwrap();
        assert!(ip("-4 addr show dev lo").contains("127.0.0.1/8"));
        let card = ip("-4 addr show dev eth0");
        assert!(card.contains("10.0.0.2/30") && card.contains("mtu 1400"), "{card}");
        assert!(card.contains(",UP"), "{card}");
        assert!(ip("route").contains("default via 10.0.0.1 dev eth0"));
        let neighbour = ip("neigh show dev eth0");
        assert!(neighbour.contains("10.0.0.1 lladdr 02:74:70:00:00:01 PERMANENT"), "{neighbour}");
        // Once more changes nothing.
        set_up(Some(1400)).unwrap();
    });
}

#[test]
fn a_machine_without_a_card_has_loopback() {
    elsewhere(|| {
        set_up(None).unwrap();
        assert!(ip("-4 addr show dev lo").contains("127.0.0.1/8"));
    });
}
