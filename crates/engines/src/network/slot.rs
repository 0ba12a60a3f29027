//! A machine's place in the network.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Shared;
use super::names::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, PREFIX};

/// A pair of links that belongs to one machine. Dropping it gives it back: it is handed on when
/// no packet socket is left on it, so a machine that lives on without its `Slot` keeps it.
#[derive(Debug)]
pub struct Slot {
    pub(super) shared: Arc<Shared>,
    pub(super) number: u16,
    /// Of the host end.
    pub(super) index: u32,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.give_back(self.number);
    }
}

/// The network card of a guest, as the guest is to see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub name: String,
    pub mtu: u32,
    pub mac: [u8; 6],
    pub gateway_mac: [u8; 6],
    pub address: Ipv4Addr,
    pub prefix: u8,
    pub gateway: Ipv4Addr,
}

impl Slot {
    /// What to remember, to adopt it later.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// What its guest is called on this host.
    pub fn address(&self) -> Ipv4Addr {
        self.shared.block.address(self.number)
    }

    pub fn link(&self) -> Link {
        Link {
            name: "eth0".to_owned(),
            mtu: self.shared.mtu,
            mac: GUEST_MAC,
            gateway_mac: GATEWAY_MAC,
            address: GUEST,
            prefix: PREFIX,
            gateway: GATEWAY,
        }
    }

    /// A new socket for the guest's frames, without any of earlier times. Blocks for a fraction of
    /// a millisecond, on a thread of its own.
    pub fn packet_socket(&self) -> io::Result<OwnedFd> {
        let parking = self.shared.parking.lock().clone();
        parking.ok_or(io::ErrorKind::NotConnected)?.namespace.packet_socket(self.number)
    }
}
