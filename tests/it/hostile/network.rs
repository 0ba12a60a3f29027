//! A guest that tries everything to reach its host, its neighbours and private places.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use torpor_e2e::{Internet, World};

use super::inside::all_hold_inside;
use crate::network::host_addresses;

/// A service of the host that writes down whoever comes.
struct Service {
    tcp: u16,
    udp: u16,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Service {
    fn start() -> Self {
        let seen = Arc::<Mutex<Vec<String>>>::default();
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let tcp = listener.local_addr().unwrap().port();
        let udp = socket.local_addr().unwrap().port();
        let (by_tcp, by_udp) = (Arc::clone(&seen), Arc::clone(&seen));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                by_tcp.lock().push(format!("{:?}", stream.peer_addr()));
            }
        });
        std::thread::spawn(move || {
            let mut bytes = [0; 100];
            while let Ok((_, peer)) = socket.recv_from(&mut bytes) {
                by_udp.lock().push(format!("{peer}"));
                let _ = socket.send_to(b"found", peer);
            }
        });
        Self { tcp, udp, seen }
    }
}

/// What is there to be reached, and a name server that lies about it.
pub(super) struct Surroundings {
    service: Service,
    config: Value,
}

impl Surroundings {
    pub(super) fn of(world: &World, internet: &Internet) -> Self {
        let own = host_addresses();
        let lies = [("loopback.test", "127.0.0.1"), ("metadata.test", "169.254.169.254")];
        for (name, address) in lies.into_iter().chain([("host.test", own[0].as_str())]) {
            internet.point(name, address.parse::<Ipv4Addr>().unwrap());
        }
        let service = Service::start();
        let api: u16 = world.address().rsplit(':').next().unwrap().parse().unwrap();
        let config = json!({
            "hosts": own, "tcp": service.tcp, "udp": service.udp, "api": api,
            "lies": ["loopback.test", "metadata.test", "host.test"], "outside": internet.address,
        });
        Self { service, config }
    }

    pub(super) fn config(&self) -> Value {
        self.config.clone()
    }

    #[track_caller]
    pub(super) fn nobody_came(&self) {
        assert_eq!(*self.service.seen.lock(), Vec::<String>::new());
    }
}

#[test]
fn a_hostile_guest_reaches_neither_host_nor_neighbours_nor_metadata() {
    let internet = Internet::with(&["api.test"]);
    let world = World::in_internet(&internet, &[]);
    let surroundings = Surroundings::of(&world, &internet);
    // Without a policy, with names in it, with names of which some lie, and without any way out.
    let policies: [(&str, &[&str]); 4] = [
        ("network", &[]),
        ("network", &["--deny", "evil.test"]),
        ("network", &["--allow", "*.test"]),
        ("tunnel", &["--no-internet"]),
    ];
    world.create("neighbour");
    for (number, (group, policy)) in policies.into_iter().enumerate() {
        let name = format!("hostile-{number}");
        world.create_with(&name, policy);
        world.put_guest_programs(&name);
        internet.asked.lock().clear();
        all_hold_inside(&world, &name, &[group], surroundings.config());
        surroundings.nobody_came();
        let asked = internet.asked.lock().clone();
        assert!(asked.iter().all(|name| !name.contains("tunnel")), "{policy:?}: {asked:?}");
    }
}
