//! A host, a world behind its uplink and guests, all of them namespaces.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use torpor_lifecycle::engine::{GuestRegistry, LoggedPacket};
use torpor_protocol::{Network as Policy, SandboxId};

use super::super::names::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, Names, SLOTS, far_link};
use super::super::namespace::{self, Namespace};
use super::super::{Left, Network, NetworkError, Slot, card};

/// In the world, and to be reached.
pub(super) const PUBLIC: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
/// Another one, of another network.
pub(super) const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
/// In the world, to be reached only as 10.0.0.1 port 53.
pub(super) const RESOLVER: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 53);
/// The host on its uplink, and the router there.
pub(super) const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
pub(super) const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// In the world, and answering, so that only the firewall keeps guests from them.
pub(super) const FORBIDDEN: [&str; 9] = [
    "10.255.255.53",
    "100.64.1.1",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.5.5",
    "192.0.0.192",
    "192.168.7.7",
    "198.18.0.1",
    "240.1.2.3",
];
/// Where the TCP servers are.
pub(super) const PORT: u16 = 8000;
/// Where `datagram` goes.
pub(super) const DATAGRAM_PORT: u16 = 5000;
/// For what must come: a first packet may be lost and is sent again after a second.
const PATIENCE: Duration = Duration::from_secs(10);

static COUNT: AtomicU32 = AtomicU32::new(0);

pub(super) fn fresh_tag() -> String {
    // Ten bits of count and twenty of process: unique among tests that run at the same time.
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let number = (std::process::id() << 10) ^ count;
    // Links carry the first six digits, which must differ too.
    format!("{:06x}ff", number & 0xff_ffff)
}

/// Runs a test on a host of its own.
pub(super) fn on_a_host(test: impl AsyncFnOnce(&World) + Send) {
    let nft = Command::new("nft").env("PATH", crate::program::search_path()).arg("-v").output();
    if !rustix::process::geteuid().is_root() || nft.is_err() {
        torpor_testkit::missing("slots need root and nft");
        return;
    }
    std::thread::scope(|scope| {
        let host = scope.spawn(|| {
            namespace::leave_network().expect("a host");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let world = World::new();
                test(&world).await;
            });
        });
        if let Err(panic) = host.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

pub(super) struct World {
    beyond: Place,
}

/// A namespace with a name, gone at the end of the test.
pub(super) struct Place {
    names: Names,
    namespace: Namespace,
}

impl Place {
    pub(super) fn new() -> Self {
        let names = Names::new(&fresh_tag()).expect("a tag");
        let namespace = Namespace::ensure(&names).expect("a namespace");
        let place = Self { names, namespace };
        place.ip("link set lo up");
        place
    }

    pub(super) fn name(&self) -> String {
        let path = self.names.namespace();
        path.file_name().and_then(|name| name.to_str()).expect("plain letters").to_owned()
    }

    pub(super) fn ip(&self, arguments: &str) {
        self.inside(|| {
            ip(arguments);
            Ok(())
        })
        .expect("inside");
    }

    pub(super) fn inside<T: Send>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        self.namespace.enter(work)
    }

    /// Answers each connection with the caller's address and then sends back what it is sent.
    pub(super) fn serve(&self) {
        serve(self.inside(|| TcpListener::bind(("0.0.0.0", PORT))).expect("a server"));
    }

    pub(super) fn connect(&self, to: Ipv4Addr) -> io::Result<TcpStream> {
        self.connect_to(to, PORT)
    }

    pub(super) fn connect_to(&self, to: Ipv4Addr, port: u16) -> io::Result<TcpStream> {
        let address = SocketAddr::from((to, port));
        self.inside(|| TcpStream::connect_timeout(&address, PATIENCE))
    }

    /// A socket for datagrams that does not wait for ever.
    pub(super) fn listen(&self, address: Ipv4Addr, port: u16) -> UdpSocket {
        let socket = self.inside(|| UdpSocket::bind((address, port))).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        socket
    }

    /// Sends a datagram and waits for the answer.
    pub(super) fn ask(&self, to: Ipv4Addr, port: u16) -> io::Result<String> {
        self.inside(|| {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.connect((to, port))?;
            socket.send(b"who")?;
            let mut answer = [0; 100];
            let length = socket.recv(&mut answer)?;
            Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = namespace::remove(&self.names);
    }
}

impl World {
    fn new() -> Self {
        ip("link set lo up");
        // Else a guest that asks much is refused by silence.
        std::fs::write("/proc/sys/net/ipv4/icmp_ratelimit", "0").expect("a setting");
        let beyond = Place::new();
        ip(&format!("link add up0 mtu 1400 type veth peer name down0 netns {}", beyond.name()));
        ip("link set up0 up");
        ip(&format!("addr add {HOST}/24 dev up0"));
        ip(&format!("route add default via {ROUTER}"));
        beyond.ip(&format!("addr add {ROUTER}/24 dev down0"));
        beyond.ip("link set down0 mtu 1400 up");
        let public = [PUBLIC, ELSEWHERE].map(|address| address.to_string());
        for address in FORBIDDEN.into_iter().chain(public.iter().map(String::as_str)) {
            beyond.ip(&format!("addr add {address}/32 dev lo"));
        }
        beyond.serve();
        let names = beyond.inside(|| UdpSocket::bind((RESOLVER, 53))).expect("a name server");
        answer_names(names);
        serve(TcpListener::bind(("0.0.0.0", PORT)).expect("a server of the host"));
        Self { beyond }
    }

    pub(super) fn beyond(&self) -> &Place {
        &self.beyond
    }

    pub(super) async fn network(&self, tag: &str) -> Opened {
        Opened::new(tag, &[], Some(RESOLVER)).await
    }

    /// The same on a host without a name server.
    pub(super) async fn network_without_names(&self, tag: &str) -> Opened {
        Opened::new(tag, &[], None).await
    }

    /// The same on a host with another name server.
    pub(super) async fn network_asking(&self, tag: &str, resolver: Ipv4Addr) -> Opened {
        Opened::new(tag, &[], Some(resolver)).await
    }

    /// The same for a daemon that knows machines of an earlier one, by their slots.
    pub(super) async fn network_with(&self, tag: &str, left: &[(u16, Policy)]) -> Opened {
        Opened::new(tag, left, Some(RESOLVER)).await
    }
}

/// A network whose traces go with the test, however it ends.
pub(super) struct Opened {
    pub(super) tag: String,
    pub(super) registry: Arc<Watching>,
    network: Option<Network>,
}

/// What a registry was told.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Heard {
    Registered(Ipv4Addr, SandboxId, Policy),
    Dismissed(Ipv4Addr),
    Packet(Ipv4Addr, LoggedPacket),
}

/// A registry that remembers all that it is told.
#[derive(Debug, Default)]
pub(super) struct Watching(Mutex<Vec<Heard>>);

impl Watching {
    pub(super) fn heard(&self) -> Vec<Heard> {
        self.0.lock().clone()
    }

    /// What became of the packets of a guest.
    pub(super) fn packets(&self, guest: Ipv4Addr) -> Vec<LoggedPacket> {
        let packets = |heard: Heard| match heard {
            Heard::Packet(from, packet) if from == guest => Some(packet),
            Heard::Registered(..) | Heard::Dismissed(_) | Heard::Packet(..) => None,
        };
        self.heard().into_iter().filter_map(packets).collect()
    }
}

impl GuestRegistry for Watching {
    fn register(&self, guest: Ipv4Addr, id: &SandboxId, network: &Policy) {
        self.0.lock().push(Heard::Registered(guest, id.clone(), network.clone()));
    }
    fn unregister(&self, guest: Ipv4Addr) {
        self.0.lock().push(Heard::Dismissed(guest));
    }
    fn packet_logged(&self, guest: Ipv4Addr, packet: LoggedPacket) {
        self.0.lock().push(Heard::Packet(guest, packet));
    }
}

/// Whose guest it is does not matter to a firewall.
pub(super) fn somebody() -> SandboxId {
    static SOMEBODY: std::sync::LazyLock<SandboxId> = std::sync::LazyLock::new(SandboxId::random);
    SOMEBODY.clone()
}

impl std::ops::Deref for Opened {
    type Target = Network;
    fn deref(&self) -> &Network {
        self.network.as_ref().expect("it is open")
    }
}

impl Opened {
    async fn new(tag: &str, left: &[(u16, Policy)], resolver: Option<Ipv4Addr>) -> Self {
        let left = left.iter().map(|(slot, policy)| Left {
            slot: *slot,
            sandbox: Some(somebody()),
            policy: policy.clone(),
        });
        let left: Vec<Left> = left.collect();
        let registry = Arc::new(Watching::default());
        let opened = Network::open_with(tag, &left, registry.clone(), resolver).await;
        Self { tag: tag.to_owned(), registry, network: Some(opened.expect("a network")) }
    }

    /// A slot for somebody's guest.
    pub(super) async fn take(&self, policy: &Policy) -> Result<Slot, NetworkError> {
        let slot = (**self).take().await?;
        self.set_policy(&slot, policy).await?;
        Ok(slot)
    }

    pub(super) async fn set_policy(
        &self,
        slot: &Slot,
        policy: &Policy,
    ) -> Result<(), NetworkError> {
        (**self).set_policy(slot, &somebody(), policy).await
    }

    pub(super) async fn adopt(&self, number: u16, policy: &Policy) -> Result<Slot, NetworkError> {
        (**self).adopt(number, &somebody(), policy).await
    }

    /// What a daemon leaves that is killed.
    pub(super) fn crash(mut self) -> String {
        self.network.take();
        self.tag.clone()
    }

    /// A guest with a kernel of its own on this slot: it takes the far end out of the parking place.
    pub(super) fn guest(&self, slot: &Slot) -> Place {
        let guest = Place::new();
        let parking = self.parking();
        let far = far_link(slot.number());
        let (mac, gateway_mac) = (text(GUEST_MAC), text(GATEWAY_MAC));
        let move_it = format!("link set {far} netns {}", guest.name());
        let moved = parking.enter(|| {
            ip(&move_it);
            Ok(())
        });
        moved.expect("moved");
        guest.ip(&format!("link set {far} address {mac} up"));
        guest.ip(&format!("addr add {GUEST}/30 dev {far}"));
        guest.ip(&format!("neigh add {GATEWAY} lladdr {gateway_mac} dev {far}"));
        guest.ip(&format!("route add default via {GATEWAY}"));
        self.wait_until_up(slot, |work| guest.inside(work));
        guest
    }

    /// The network card of a guest that speaks at once: a link that was just connected drops
    /// packets until the kernel gets round to it.
    pub(super) fn card(&self, slot: &Slot) -> OwnedFd {
        self.wait_for_both_ends(slot);
        slot.packet_socket().expect("a socket")
    }

    pub(super) fn wait_for_both_ends(&self, slot: &Slot) {
        let parking = self.parking();
        self.wait_until_up(slot, |work| parking.enter(work));
    }

    pub(super) fn parking(&self) -> Namespace {
        Namespace::ensure(&Names::new(&self.tag).expect("a tag")).expect("parking")
    }

    fn wait_until_up(&self, slot: &Slot, at_the_far_end: impl FnOnce(Check) -> io::Result<()>) {
        wait_until_up(&Names::new(&self.tag).expect("a tag").link(slot.number()));
        let far = far_link(slot.number());
        let check = move || {
            wait_until_up(&far);
            Ok(())
        };
        at_the_far_end(Box::new(check)).expect("inside");
    }
}

type Check = Box<dyn FnOnce() -> io::Result<()> + Send>;

impl Drop for Opened {
    fn drop(&mut self) {
        // A crash was asked for: the test goes on with what is left.
        if self.network.take().is_some() {
            let names = Names::new(&self.tag).expect("a tag");
            let _ = namespace::remove(&names);
            let claims = super::super::block::Claims::lock().expect("the lock");
            for block in claims.of(&names) {
                let _ = card::forget_nodes(block, 1..=SLOTS);
            }
            claims.give_up(&names);
        }
    }
}

fn wait_until_up(link: &str) {
    let deadline = Instant::now() + PATIENCE;
    while !ip(&format!("link show dev {link}")).contains("state UP") {
        assert!(Instant::now() < deadline, "{link} does not come up");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(super) fn ip(arguments: &str) -> String {
    let output = Command::new("ip")
        .env("PATH", crate::program::search_path())
        .args(arguments.split_whitespace())
        .output()
        .expect("ip runs");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Who the server saw, if it answers at all.
pub(super) fn greeting(stream: &mut TcpStream) -> io::Result<String> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut length = [0];
    stream.read_exact(&mut length)?;
    let mut text = vec![0; usize::from(length[0])];
    stream.read_exact(&mut text)?;
    String::from_utf8(text).map_err(io::Error::other)
}

pub(super) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} did not happen in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(super) async fn close(network: Opened) -> Result<(), NetworkError> {
    let closed = network.close().await;
    network.crash();
    closed
}

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Threads of servers end with the test's process.
fn serve(listener: TcpListener) {
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || -> io::Result<()> {
                let caller = stream.peer_addr()?.ip().to_string();
                stream.write_all(&[u8::try_from(caller.len()).expect("short")])?;
                stream.write_all(caller.as_bytes())?;
                let mut back = stream.try_clone()?;
                io::copy(&mut stream, &mut back)?;
                Ok(())
            });
        }
    });
}

fn answer_names(socket: UdpSocket) {
    std::thread::spawn(move || {
        let mut question = [0; 512];
        while let Ok((_, from)) = socket.recv_from(&mut question) {
            let _ = socket.send_to(from.ip().to_string().as_bytes(), from);
        }
    });
}

/// The next packet that comes in on a network card.
pub(super) fn read(socket: OwnedFd) -> Vec<u8> {
    let timeout = Some(Duration::from_secs(5));
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, timeout)
        .expect("a timeout");
    let mut packet = vec![0; 2000];
    let length = std::fs::File::from(socket).read(&mut packet).expect("a packet");
    packet.truncate(length);
    packet
}

/// A frame of a guest, with the header that tells the kernel that nothing is left to do.
pub(super) fn datagram(from: Ipv4Addr, to: Ipv4Addr, text: &[u8]) -> Vec<u8> {
    let bytes = u16::try_from(8 + text.len()).expect("a small text").to_be_bytes();
    let all_bytes = u16::try_from(28 + text.len()).expect("a small text").to_be_bytes();
    let mut ip = vec![0x45, 0, all_bytes[0], all_bytes[1], 0, 0, 0, 0, 64, 17, 0, 0];
    ip.extend(from.octets());
    ip.extend(to.octets());
    let words = ip.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let checksum = !u16::try_from((sum >> 16) + (sum & 0xffff)).expect("folded");
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let ports = [4000_u16.to_be_bytes(), DATAGRAM_PORT.to_be_bytes()].concat();
    let udp = [&ports[..], &bytes, &[0, 0], text].concat();
    [&[0; 10][..], &GATEWAY_MAC, &GUEST_MAC, &[8, 0], &ip, &udp].concat()
}
