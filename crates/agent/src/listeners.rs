//! At which addresses of the machine somebody listens on a port, for servers that listen neither on all
//! addresses nor on loopback. The kernel says it in `/proc/net/tcp` and `/proc/net/tcp6`.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// How much of each table is read: thousands of sockets.
const TABLE_MAX: u64 = 1024 * 1024;
/// Addresses that are tried: a machine has one or two of its own.
const ADDRESSES_MAX: usize = 4;
/// The state of a socket that listens, as the kernel writes it.
const LISTEN: &str = "0A";

/// Without the usual loopback addresses, and those that stand for all.
pub(crate) fn addresses(port: u16) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let mut text = String::new();
        let read = File::open(path).and_then(|file| file.take(TABLE_MAX).read_to_string(&mut text));
        if read.is_ok() {
            found.extend(text.lines().filter_map(|line| address(line, port)));
        }
    }
    found.truncate(ADDRESSES_MAX);
    found
}

/// The address of a line of a table, if somebody listens there on this port.
fn address(line: &str, port: u16) -> Option<IpAddr> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (own, _, state) = (words.next()?, words.next()?, words.next()?);
    let (address, its_port) = own.split_once(':')?;
    if state != LISTEN || u16::from_str_radix(its_port, 16) != Ok(port) {
        return None;
    }
    let address = parse(address)?;
    let usual = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    (!address.is_unspecified() && !usual.contains(&address)).then_some(address)
}

/// Words of 32 bits, each as this processor keeps it in memory.
fn parse(text: &str) -> Option<IpAddr> {
    let word = |index: usize| {
        let digits = text.get(index * 8..index * 8 + 8)?;
        u32::from_str_radix(digits, 16).ok().map(u32::to_ne_bytes)
    };
    match text.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            Some(IpAddr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn only_addresses_of_our_own_where_somebody_listens_count() {
        let found = |line: &str| address(line, 3000);
        let own = "0: 0200000A:0BB8 00000000:0000 0A 0:0 00:0";
        assert_eq!(found(own), Some("10.0.0.2".parse().unwrap()));
        let new = "1: 000080FE00000000FF005450FE97E9FE:0BB8 0:0 0A";
        assert_eq!(found(new), Some("fe80::5054:ff:fee9:97fe".parse().unwrap()));
        for other in [
            "0: 0100007F:0BB8 00000000:0000 0A",
            "0: 00000000:0BB8 00000000:0000 0A",
            "0: 0200000A:0BB9 00000000:0000 0A",
            "0: 0200000A:0BB8 0300000A:1000 01",
            "0: 00000000000000000000000001000000:0BB8 0:0 0A",
            "0: 0200000:0BB8 0:0 0A",
            "0: 0200000\u{fc}:0BB8 0:0 0A",
            "",
        ] {
            assert_eq!(found(other), None, "{other}");
        }
    }

    #[test]
    fn a_server_at_another_address_of_loopback_is_found() {
        let server = std::net::TcpListener::bind("127.0.0.9:0").unwrap();
        let port = server.local_addr().unwrap().port();
        assert_eq!(addresses(port), [IpAddr::from([127, 0, 0, 9])]);
    }
}
