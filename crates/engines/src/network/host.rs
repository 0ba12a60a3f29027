//! What the network of the host is like, and the switches we need in it.

use std::fs;
use std::io;
use std::net::Ipv4Addr;

use crate::directory::absent;

const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
/// The second is where a local stub resolver names the servers behind it.
const RESOLVERS: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

/// Lets this host pass on packets that are not its own.
pub(super) fn enable_forwarding() -> io::Result<()> {
    if fs::read_to_string(FORWARDING)?.trim() == "0" {
        fs::write(FORWARDING, "1")?;
        tracing::info!("switched on net.ipv4.ip_forward: sandboxes need it to reach the internet");
    }
    Ok(())
}

/// For one link, or `default`: those that come. A kernel without IPv6 is fine.
pub(super) fn disable_ipv6(link: &str) -> io::Result<()> {
    absent(fs::write(format!("/proc/sys/net/ipv6/conf/{link}/disable_ipv6"), "1"))
}

/// The name server that guests are sent to: the first that is not on the loopback of the host,
/// which guests can't be sent to. `None`: names can't be resolved in sandboxes on this host.
pub(super) fn resolver() -> Option<Ipv4Addr> {
    RESOLVERS.iter().find_map(|file| first_resolver(&fs::read_to_string(file).ok()?))
}

fn first_resolver(text: &str) -> Option<Ipv4Addr> {
    let server = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next()? == "nameserver").then(|| words.next()?.parse::<Ipv4Addr>().ok())?
    };
    let usable = |address: &Ipv4Addr| !address.is_loopback() && !address.is_unspecified();
    text.lines().filter_map(server).find(usable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_server_that_guests_can_reach_is_chosen() {
        let text = "# nameserver 9.9.9.9\nsearch example\nnameserver 127.0.0.53\n\
                    nameserver fe80::1\nnameserver 10.255.255.53\nnameserver 192.0.2.1\n";
        assert_eq!(first_resolver(text), Some(Ipv4Addr::new(10, 255, 255, 53)));
        assert_eq!(first_resolver("nameserver 127.0.0.1\noptions edns0\n"), None);
        assert_eq!(first_resolver(""), None);
    }
}
