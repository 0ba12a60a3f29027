//! A machine's place in the network.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use torpor_lifecycle::chain;

use super::conntrack::Flow;
use super::names::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, PREFIX, far_index};
use super::reach::Reach;
use super::{NetworkError, Shared, conntrack, firewall, list};

/// A pair of links that belongs to one machine. Dropping it gives it back: it is handed on when
/// no packet socket and no open network card is left on it, so a machine that lives on without its `Slot` keeps it.
#[derive(Debug)]
pub struct Slot {
    pub(super) shared: Arc<Shared>,
    pub(super) number: u16,
    /// Of the host end.
    pub(super) index: u32,
    /// `None`: as an earlier daemon left it.
    reach: Mutex<Option<Reach>>,
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
    pub(super) fn new(shared: &Arc<Shared>, number: u16, index: u32, reach: Option<Reach>) -> Self {
        Self { shared: Arc::clone(shared), number, index, reach: Mutex::new(reach) }
    }

    /// What to remember, to adopt it later.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// A number that no other slot of this host has, whatever installation it belongs to.
    pub(crate) fn place(&self) -> u16 {
        self.shared.block.place(self.number)
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

    /// On `Err` it is as it was.
    pub(super) async fn set_reach(&self, wanted: Reach) -> Result<(), NetworkError> {
        let mut reach = self.reach.lock().await;
        if reach.as_ref() == Some(&wanted) {
            return Ok(());
        }
        if let Err(error) = self.install(&wanted).await {
            if let Some(before) = reach.as_ref() {
                // A refused transaction changed nothing; this is for whatever else there is.
                let _ = self.install(before).await;
            }
            return Err(error);
        }
        if reach.replace(wanted.clone()).is_some() {
            self.forget_beyond(wanted).await;
        }
        Ok(())
    }

    /// One message to the kernel for a slot without a list, else one transaction of the firewall.
    async fn install(&self, reach: &Reach) -> Result<(), NetworkError> {
        let Self { shared, number, index, .. } = self;
        let listed = shared.lists.lock().contains_key(number);
        if !listed && !reach.is_list() {
            return shared.links.set_open(*index, *reach == Reach::OPEN).await;
        }
        // Before it is there: so it is removed in any case.
        shared.lists.lock().insert(*number, reach.clone());
        let list = list::list(&shared.names, shared.block, *number, reach);
        firewall::apply(&list).await?;
        self.pace(reach.limits.bytes_per_sec).await;
        // For a firewall without the list, of a daemon that does not know of it.
        shared.links.set_open(*index, *reach == Reach::OPEN).await
    }

    /// The firewall holds the cap; this makes it bearable, and goes wrong without harm.
    async fn pace(&self, rate: Option<u64>) {
        let Some(parking) = self.shared.parking.lock().clone() else { return };
        let far = far_index(self.number);
        let paced = match rate.filter(|rate| *rate > 0) {
            Some(rate) => parking.links.pace(far, rate).await,
            None => parking.links.unpace(far).await,
        };
        if let Err(error) = paced {
            let slot = self.number;
            tracing::warn!(slot, error = %chain(&error), "what is too much is lost and not late");
        }
    }

    /// The firewall lets nothing through of a connection that is beyond `reach`. This tells the other
    /// side, and goes wrong without harm.
    async fn forget_beyond(&self, reach: Reach) {
        let (address, closed) = (self.address(), self.shared.closed.clone());
        let proxy = self.shared.block.egress_proxy().address;
        let beyond = move |flow: &Flow| !reach.keeps(flow, proxy, &closed);
        let forget = move || conntrack::forget(address, beyond);
        match spawn_blocking(forget).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(slot = self.number, %error, "cut connections linger"),
            Err(error) => tracing::warn!(slot = self.number, %error, "cut connections linger"),
        }
    }
}
