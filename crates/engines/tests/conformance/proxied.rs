//! Machines whose connections somebody else decides about.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::net::sockopt::ip_original_dst;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout};
use torpor_lifecycle::engine::{GuestRegistry, LoggedPacket};
use torpor_lifecycle::guest::Guest;
use torpor_protocol::{Network, SandboxId};

use crate::outside::{Outside, PORT};
use crate::world::{PATIENCE, boot, eventually, greet, say, world};

/// Who an address was said to be; `None`: nobody.
type Known = Option<(SandboxId, Network)>;

/// A registry that remembers who is registered.
#[derive(Default)]
struct Watching(Mutex<Vec<(Ipv4Addr, Known)>>);

impl Watching {
    /// The latest of an address.
    fn of(&self, guest: Ipv4Addr) -> Known {
        let heard = self.0.lock();
        heard.iter().rev().find(|(address, _)| *address == guest)?.1.clone()
    }
}

impl GuestRegistry for Watching {
    fn register(&self, guest: Ipv4Addr, id: &SandboxId, network: &Network) {
        self.0.lock().push((guest, Some((id.clone(), network.clone()))));
    }
    fn unregister(&self, guest: Ipv4Addr) {
        self.0.lock().push((guest, None));
    }
    fn packet_logged(&self, _: Ipv4Addr, _: LoggedPacket) {}
}

fn proxied() -> Network {
    Network { deny: vec!["example.com".parse().unwrap()], ..Network::default() }
}

/// Has the guest connect to the outside. Returns who arrived at the egress proxy, having told it `word`.
async fn arrives(guest: &Guest, door: &TcpListener, to: &str, word: &str) -> Ipv4Addr {
    let script = format!("exec 3<>/dev/tcp/{to}/{PORT} && head -1 <&3");
    let arrived = async {
        let (mut stream, from) = timeout(PATIENCE, door.accept()).await.expect("in time").unwrap();
        let wanted = SocketAddrV4::new(to.parse().unwrap(), PORT);
        assert_eq!(ip_original_dst(&stream).unwrap(), wanted);
        stream.write_all(format!("{word}\n").as_bytes()).await.unwrap();
        let std::net::IpAddr::V4(from) = from.ip() else { panic!("{from} is no guest") };
        from
    };
    let (heard, from) = tokio::join!(say(guest, &script), arrived);
    assert_eq!(heard, word);
    from
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxied_machine_is_led_to_the_egress_proxy_and_known_there_from_first_to_last() {
    let Some(mut world) = world().await else { return };
    let watching = Arc::new(Watching::default());
    world.config.registry = watching.clone();
    world.reopen().await;
    let (mut plan, outside) = (world.plan(), Outside::new(&world));
    let [one, two] = &outside.addresses;
    plan.spec.network = proxied();
    let about = world.engine().about().clone();
    assert_eq!(about.nameserver.as_deref(), Some("10.0.0.1"));
    let proxy = about.egress_proxy.expect("guests are led somewhere");
    let door = TcpListener::bind((proxy.address, proxy.connections)).await.unwrap();

    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let address = arrives(&guest, &door, one, "led").await;
    assert_eq!(watching.of(address), Some((plan.id.clone(), proxied())));
    machine.set_network(&Network::OPEN).await.unwrap();
    assert_eq!(watching.of(address), Some((plan.id.clone(), Network::OPEN)));
    let direct = format!("exec 3<>/dev/tcp/{two}/{PORT} && head -1 <&3");
    assert_eq!(say(&guest, &direct).await, "hi", "past the egress proxy");
    machine.set_network(&proxied()).await.unwrap();
    drop((machine, guest));

    watching.0.lock().clear();
    world.reopen().await;
    assert_eq!(watching.of(address), Some((plan.id.clone(), proxied())), "before it is adopted");
    let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    let guest = greet(machine.channel()).await;
    assert_eq!(arrives(&guest, &door, two, "led again").await, address);
    machine.kill().await.unwrap();
    eventually("it is unregistered", || watching.of(address).is_none()).await;
    assert_eq!(watching.0.lock().last(), Some(&(address, None)), "and nothing after it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_with_a_cap_sends_about_as_many_bytes_as_it_may() {
    const RATE: u64 = 2_000_000;
    let Some(world) = world().await else { return };
    let mut plan = world.plan();
    plan.spec.network = proxied();
    plan.spec.network.limits.bytes_per_sec = Some(RATE);
    let proxy = world.engine().about().egress_proxy.expect("guests are led somewhere");
    let door = TcpListener::bind((proxy.address, proxy.connections)).await.unwrap();
    let (machine, guest) = boot(&**world.engine(), plan).await;
    let send = "dd if=/dev/zero bs=65536 count=92 > /dev/tcp/45.45.45.45/80 2>/dev/null";
    let received = async {
        let (mut stream, _) = timeout(PATIENCE, door.accept()).await.expect("in time").unwrap();
        let mut buffer = vec![0; 64 << 10];
        let (begun, mut bytes) = (Instant::now(), 0);
        loop {
            match timeout(PATIENCE, stream.read(&mut buffer)).await.expect("in time").unwrap() {
                0 => break bytes * 1000 / u64::try_from(begun.elapsed().as_millis()).unwrap(),
                length => bytes += u64::try_from(length).unwrap(),
            }
        }
    };
    let (_, rate) = tokio::join!(say(&guest, send), received);
    // A busy host is slower, and counts late what it was sent before; bits would be eight times off.
    assert!((RATE / 4..=RATE * 3 / 2).contains(&rate), "{rate} of {RATE} bytes in a second");
    machine.kill().await.unwrap();
}
