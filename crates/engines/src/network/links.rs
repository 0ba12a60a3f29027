//! Links, routes and neighbours, by messages to the kernel.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use futures_util::TryStreamExt;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage};
use rtnetlink::packet_route::neighbour::NeighbourState;
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType,
};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder};
use tokio::task::JoinHandle;
use torpor_protocol::AddressRange;

use super::NetworkError;
use super::names::{FAR_MAC, GATEWAY_MAC, GUEST, GUEST_MAC};
use super::namespace::Namespace;
use super::rules::{OPEN, SHUT};

type Connection = rtnetlink::proto::Connection<RouteNetlinkMessage>;

/// What an ordinary link carries; more would be cut on the way anyway.
const MTU_MAX: u32 = 1500;
/// The kernel makes it before all others, in every namespace.
const LOOPBACK: u32 = 1;

/// A road to the kernel's tables in the namespace of the thread that opened it.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) handle: Handle,
    connection: JoinHandle<()>,
}

impl Drop for Links {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// The way out of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Surroundings {
    pub(super) mtu: u32,
    /// Networks that the host reaches without a gateway, and its own addresses.
    pub(super) near: Vec<AddressRange>,
}

impl Links {
    pub(super) fn open() -> Result<Self, NetworkError> {
        Self::start(rtnetlink::new_connection())
    }

    /// The same for another namespace: a socket stays in the one it was opened in.
    pub(super) fn open_in(namespace: &Namespace) -> Result<Self, NetworkError> {
        let runtime = tokio::runtime::Handle::current();
        Self::start(namespace.enter(move || {
            let _entered = runtime.enter();
            rtnetlink::new_connection()
        }))
    }

    fn start<M>(opened: io::Result<(Connection, Handle, M)>) -> Result<Self, NetworkError> {
        let (connection, handle, _) =
            opened.map_err(NetworkError::host("open a netlink socket"))?;
        Ok(Self { handle, connection: tokio::spawn(connection) })
    }

    /// Name and number of every link of this namespace.
    pub(super) async fn list(&self) -> Result<Vec<(String, u32)>, NetworkError> {
        let links: Vec<LinkMessage> = self
            .handle
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .map_err(NetworkError::kernel("list the links"))?;
        let named = |link: &LinkMessage| Some((name_of(link)?, link.header.index));
        Ok(links.iter().filter_map(named).collect())
    }

    /// Makes a pair: the far end here, up; the host end in the namespace `host`, still down.
    pub(super) async fn add_pair(
        &self,
        (far, far_index): (&str, u32),
        name: &str,
        host: BorrowedFd<'_>,
        mtu: u32,
    ) -> Result<(), NetworkError> {
        let near = LinkMessageBuilder::<LinkUnspec>::new()
            .name(name)
            .mtu(mtu)
            .address(GATEWAY_MAC.to_vec())
            .link_group(OPEN)
            // The neighbour is known for good; what a guest says about addresses is not listened to.
            .arp(false)
            .setns_by_fd(host.as_raw_fd())
            .build();
        let pair = LinkVeth::new(far, "")
            .index(far_index)
            .mtu(mtu)
            .address(FAR_MAC.to_vec())
            .up()
            .set_info_data(InfoData::Veth(InfoVeth::Peer(near)))
            .build();
        let made = self.handle.link().add(pair).execute().await;
        made.map_err(NetworkError::kernel("make a pair of links"))
    }

    pub(super) async fn index(&self, name: &str) -> Result<u32, NetworkError> {
        let failed = NetworkError::kernel("find a link");
        let found = self.handle.link().get().match_name(name).execute().try_next().await;
        let link = found.map_err(failed)?;
        link.map(|link| link.header.index).ok_or(NetworkError::Vanished)
    }

    pub(super) async fn raise(&self, index: u32) -> Result<(), NetworkError> {
        let message = LinkUnspec::new_with_index(index).up().build();
        let set = self.handle.link().set(message).execute().await;
        set.map_err(NetworkError::kernel("bring a link up"))
    }

    /// Whether the slot has the internet, from this moment on.
    pub(super) async fn set_open(&self, index: u32, open: bool) -> Result<(), NetworkError> {
        let group = if open { OPEN } else { SHUT };
        let message = LinkUnspec::new_with_index(index).link_group(group).build();
        let set = self.handle.link().set(message).execute().await;
        set.map_err(NetworkError::kernel("change what a slot may reach"))
    }

    /// Sends what is for `address` out of the link, to the guest there. Idempotent.
    pub(super) async fn lead(&self, address: Ipv4Addr, index: u32) -> Result<(), NetworkError> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, 32)
            .output_interface(index)
            .scope(RouteScope::Link)
            .build();
        let routed = self.handle.route().add(route).replace().execute().await;
        routed.map_err(NetworkError::kernel("add a route"))?;
        // The kernel looks for the neighbour when the address is translated already.
        let neighbours = self.handle.neighbours();
        let known = neighbours
            .add(index, IpAddr::V4(GUEST))
            .link_layer_address(&GUEST_MAC)
            .state(NeighbourState::Permanent)
            .replace()
            .execute()
            .await;
        known.map_err(NetworkError::kernel("add a neighbour"))
    }

    /// Gives the host an address that is nobody's way out (scope), under a label to find it by.
    /// Idempotent.
    pub(super) async fn add_local(
        &self,
        address: Ipv4Addr,
        label: &str,
    ) -> Result<(), NetworkError> {
        let mut there = false;
        for message in self.locals().await? {
            let same = has(&message, &AddressAttribute::Local(IpAddr::V4(address)));
            if same && labelled(&message, label) {
                there = true;
            } else if same || labelled(&message, label) {
                // Ours of another block, or of somebody who had this block and is gone.
                self.remove_local(message).await?;
            }
        }
        if there {
            return Ok(());
        }
        let mut add = self.handle.address().add(LOOPBACK, IpAddr::V4(address), 32);
        add.message_mut().header.scope = AddressScope::Host;
        add.message_mut().attributes.push(AddressAttribute::Label(label.to_owned()));
        add.execute().await.map_err(NetworkError::kernel("add the egress proxy's address"))
    }

    /// Takes the host the addresses with this label.
    pub(super) async fn remove_locals(&self, label: &str) -> Result<(), NetworkError> {
        let locals = self.locals().await?.into_iter();
        for message in locals.filter(|message| labelled(message, label)) {
            self.remove_local(message).await?;
        }
        Ok(())
    }

    async fn locals(&self) -> Result<Vec<AddressMessage>, NetworkError> {
        let listed = self.handle.address().get().set_link_index_filter(LOOPBACK).execute();
        listed.try_collect().await.map_err(NetworkError::kernel("list the host's addresses"))
    }

    async fn remove_local(&self, message: AddressMessage) -> Result<(), NetworkError> {
        match self.handle.address().del(message).execute().await {
            Err(rtnetlink::Error::NetlinkError(error))
                if error.raw_code() == -libc::EADDRNOTAVAIL =>
            {
                Ok(())
            }
            done => done.map_err(NetworkError::kernel("remove the egress proxy's address")),
        }
    }

    /// Removes a link and with it its other end. Slow; a link that is gone is fine.
    pub(super) async fn delete(&self, index: u32) -> Result<(), NetworkError> {
        match self.handle.link().del(index).execute().await {
            Err(rtnetlink::Error::NetlinkError(error)) if gone(&error) => Ok(()),
            done => done.map_err(NetworkError::kernel("remove a link")),
        }
    }

    /// Largest packet of the way out, and the networks around this host.
    pub(super) async fn surroundings(&self) -> Result<Surroundings, NetworkError> {
        let every = RouteMessageBuilder::<Ipv4Addr>::new().build();
        let routes: Vec<RouteMessage> = self
            .handle
            .route()
            .get(every)
            .execute()
            .try_collect()
            .await
            .map_err(NetworkError::kernel("list the routes"))?;
        let mut mtu = MTU_MAX;
        for index in routes.iter().filter_map(uplink_of) {
            mtu = mtu.min(self.mtu_of(index).await?);
        }
        let mut near: Vec<AddressRange> = routes.iter().filter_map(near_of).collect();
        near.sort();
        near.dedup();
        Ok(Surroundings { mtu, near })
    }

    async fn mtu_of(&self, index: u32) -> Result<u32, NetworkError> {
        let found = self.handle.link().get().match_index(index).execute().try_next().await;
        let link = found.map_err(NetworkError::kernel("find the way out"))?;
        let mtu = |attribute: &LinkAttribute| {
            if let LinkAttribute::Mtu(mtu) = attribute { Some(*mtu) } else { None }
        };
        Ok(link.and_then(|link| link.attributes.iter().find_map(mtu)).unwrap_or(MTU_MAX))
    }
}

fn labelled(message: &AddressMessage, label: &str) -> bool {
    has(message, &AddressAttribute::Label(label.to_owned()))
}

fn has(message: &AddressMessage, attribute: &AddressAttribute) -> bool {
    message.attributes.contains(attribute)
}

fn gone(error: &rtnetlink::packet_core::ErrorMessage) -> bool {
    error.raw_code() == -libc::ENODEV
}

fn name_of(link: &LinkMessage) -> Option<String> {
    link.attributes.iter().find_map(|attribute| {
        if let LinkAttribute::IfName(name) = attribute { Some(name.clone()) } else { None }
    })
}

/// The link of a default route.
fn uplink_of(route: &RouteMessage) -> Option<u32> {
    if route.header.destination_prefix_length != 0 || route.header.kind != RouteType::Unicast {
        return None;
    }
    route.attributes.iter().find_map(|attribute| {
        if let RouteAttribute::Oif(index) = attribute { Some(*index) } else { None }
    })
}

/// The destination of a route without a gateway: hosts there are our neighbours, or ourselves. Default
/// routes without one (point-to-point links) lead to the world, not to neighbours.
fn near_of(route: &RouteMessage) -> Option<AddressRange> {
    let prefix = route.header.destination_prefix_length;
    let through = |attribute: &RouteAttribute| {
        matches!(
            attribute,
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) | RouteAttribute::MultiPath(_)
        )
    };
    let here = matches!(route.header.kind, RouteType::Unicast | RouteType::Local);
    if prefix == 0 || !here || route.attributes.iter().any(through) {
        return None;
    }
    route.attributes.iter().find_map(|attribute| {
        let RouteAttribute::Destination(RouteAddress::Inet(network)) = attribute else {
            return None;
        };
        format!("{network}/{prefix}").parse().ok()
    })
}
