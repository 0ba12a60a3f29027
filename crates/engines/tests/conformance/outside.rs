//! The internet of the tests.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::sync::mpsc;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_lifecycle::guest::Guest;

use crate::world::{PATIENCE, World, say};

/// A host somewhere in the internet, that is in a namespace of this one. Dropping it removes it.
pub(crate) struct Outside {
    name: String,
    /// It has two. They are behind a router, so that they are no neighbours of this host.
    pub(crate) addresses: [String; 2],
    /// How each connection to it ended.
    ends: mpsc::Receiver<std::io::Result<usize>>,
}

impl Outside {
    pub(crate) fn new(world: &World) -> Self {
        let name = format!("x{}", world.config.tag);
        // A public range of its own for every run of this test.
        let number = blake3::hash(name.as_bytes()).as_bytes()[0];
        let (near, far) = (format!("45.45.{number}.1"), format!("45.45.{number}.2"));
        let addresses = [9, 10].map(|last| format!("45.45.{number}.{last}"));
        let (send, ends) = mpsc::channel();
        // Made before its parts, so that they go away however this ends.
        let outside = Self { name, addresses, ends };
        let name = &outside.name;
        ip(&format!("netns add {name}"));
        ip(&format!("link add {name} type veth peer name far netns {name}"));
        ip(&format!("addr add {near}/30 dev {name}"));
        ip(&format!("link set {name} up"));
        ip(&format!("-n {name} addr add {far}/30 dev far"));
        ip(&format!("-n {name} link set far up"));
        ip(&format!("-n {name} route add default via {near}"));
        for address in &outside.addresses {
            ip(&format!("-n {name} addr add {address}/32 dev far"));
            ip(&format!("route add {address}/32 via {far}"));
        }
        let namespace = std::fs::File::open(format!("/run/netns/{name}")).unwrap();
        let (ready, listening) = mpsc::channel();
        // Ends with the test's process.
        std::thread::spawn(move || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), network).unwrap();
            let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
            ready.send(()).unwrap();
            for mut connection in listener.incoming().flatten() {
                let send = send.clone();
                std::thread::spawn(move || {
                    let _ = connection.write_all(b"hi\n");
                    let _ = send.send(connection.read(&mut [0]));
                });
            }
        });
        listening.recv().unwrap();
        outside
    }

    /// Has the guest connect, and wait for more in the background.
    pub(crate) async fn connect(&self, guest: &Guest) {
        let script = format!(
            "rm -f /root/out; (exec 3<>/dev/tcp/{}/{PORT}; cat <&3; echo x >&3; echo over) >/root/out 2>&1 & \
             until [ -s /root/out ]; do sleep 0.02; done; cat /root/out",
            self.addresses[0]
        );
        assert_eq!(say(guest, &script).await, "hi");
    }

    /// Whether no connection to it has ended yet, but those that ended well.
    pub(crate) fn still_open(&self) -> bool {
        self.ends.try_iter().all(|end| end.is_ok())
    }

    /// How the guest saw its connection end.
    pub(crate) async fn end(&self, guest: &Guest) -> String {
        let reset = self.ends.recv_timeout(PATIENCE).expect("in time").unwrap_err();
        assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset, "the other side hears of it");
        self.end_inside(guest).await
    }

    /// The same, whatever the other side heard.
    pub(crate) async fn end_inside(&self, guest: &Guest) -> String {
        say(guest, "until case $(cat /root/out) in *over) true;; *) false;; esac; do sleep 0.02; done; cat /root/out").await
    }
}

pub(crate) const PORT: u16 = 9999;

fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {args}: {output:?}");
}

impl Drop for Outside {
    fn drop(&mut self) {
        for args in [["link", "del", &self.name], ["netns", "del", &self.name]] {
            let _ = Command::new("ip").args(args).output();
        }
    }
}
