//! Connections to the outside end with a sleep, and their programs are told.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_e2e::{GUEST, TIERS, World, wait_for};

const PORT: u16 = 8000;
/// The next hop, known to nobody but that link.
const ROUTER: &str = "192.168.255.253";

/// A host with a public address (of the range for documentation), in a namespace of its own behind
/// this one. It answers every connection with "hello" and then waits.
struct Outside {
    name: String,
    link: String,
    address: Ipv4Addr,
    /// How connections ended for it.
    ends: Arc<Mutex<Vec<String>>>,
}

impl Outside {
    fn new() -> Self {
        let pid = std::process::id();
        let [.., high, low] = pid.to_be_bytes();
        let (name, link) = (format!("tp-outside-{pid}"), format!("tpo{pid}"));
        let address = Ipv4Addr::new(203, 0, 113, 128 | (high ^ low) >> 1);
        let outside = Self { name, link, address, ends: Arc::default() };
        let (name, link) = (&outside.name, &outside.link);
        ip(&format!("netns add {name}"));
        ip(&format!("link add {link} type veth peer name far netns {name}"));
        ip(&format!("-n {name} address add {address}/32 dev far"));
        ip(&format!("-n {name} address add {ROUTER}/32 dev far"));
        ip(&format!("-n {name} link set far up"));
        ip(&format!("-n {name} route add default dev far"));
        ip(&format!("link set {link} up"));
        // Behind a router, because nobody reaches the neighbours of the host.
        ip(&format!("route add {address}/32 via {ROUTER} dev {link} onlink"));
        outside.serve();
        outside
    }

    fn serve(&self) {
        let place = File::open(format!("/run/netns/{}", self.name)).unwrap();
        let ends = Arc::clone(&self.ends);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            move_into_link_name_space(place.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
            tell.send(()).unwrap();
            for connection in listener.incoming().flatten() {
                let ends = Arc::clone(&ends);
                std::thread::spawn(move || {
                    let end = converse(connection);
                    ends.lock().push(end);
                });
            }
        });
        told.recv().unwrap();
    }
}

fn converse(mut connection: TcpStream) -> String {
    let _ = connection.write_all(b"hello\n");
    let mut bytes = [0; 100];
    loop {
        match connection.read(&mut bytes) {
            Ok(0) => return "end of stream".to_owned(),
            Ok(_) => (),
            Err(error) => return format!("{:?}", error.kind()),
        }
    }
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

impl Drop for Outside {
    fn drop(&mut self) {
        for arguments in [["link", "delete", &self.link], ["netns", "delete", &self.name]] {
            let _ = Command::new("ip").args(arguments).output();
        }
    }
}

#[test]
fn a_connection_to_the_outside_ends_and_its_program_is_told() {
    let outside = Outside::new();
    let world = World::start();
    world.create_with("web", &["--idle-after", "never"]);
    world.put_guest_programs("web");
    let (program, address) = (format!("{GUEST}/outside.py"), outside.address.to_string());
    for tier in TIERS {
        world.sh("web", "rm -f /tmp/reader /tmp/writer /tmp/go").ok();
        world.start_process("web", &["python3", &program, &address, &PORT.to_string()]);
        let told = |who: &str| world.sh("web", &format!("cat /tmp/{who}")).stdout;
        wait_for("both connections", || {
            (told("reader").contains("hello") && told("writer").contains("hello")).then_some(())
        });
        world.sleep("web", tier);
        world.sh("web", "touch /tmp/go").ok();
        for who in ["reader", "writer"] {
            let said = wait_for("what the program saw", || {
                Some(told(who)).filter(|said| said.contains("saw"))
            });
            assert!(said.contains("saw ECONNABORTED"), "{tier}: the {who} {said}");
            assert!(said.contains("again hello"), "{tier}: the {who} can't connect again: {said}");
        }
    }
    // Nobody outside is left with half a connection: two were reset by each sleep, and two that were
    // made after it were closed.
    wait_for("the other ends", || {
        let ends = outside.ends.lock();
        let count = |how: &str| ends.iter().filter(|end| *end == how).count();
        (count("ConnectionReset") == 4 && count("end of stream") == 4).then_some(())
    });
}
