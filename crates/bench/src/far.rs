//! The far side of the network benchmark: a namespace with a public address, behind a router, because
//! no sandbox reaches the neighbours of its host.
//!
//! Whoever connects sends a one and hears it again, over and over, or a two with a length of eight bytes
//! and gets so many. Dropping it removes the namespace and the link.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::mpsc::{self, Sender};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Of the range for documentation: nobody has it.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 250);
/// The next hop, known to nobody but the link.
const ROUTER: &str = "192.168.255.254";
/// Written at once.
const CHUNK: usize = 256 << 10;

pub(crate) struct Far {
    pub(crate) address: Ipv4Addr,
    pub(crate) port: u16,
    namespace: String,
    link: String,
}

impl Far {
    /// Why not, if it can't be had here.
    pub(crate) fn start() -> Result<Self, String> {
        let pid = std::process::id();
        let (namespace, link) = (format!("torpor-bench-{pid}"), format!("tpb{pid}"));
        // From here on it is removed, whatever fails.
        let mut far = Self { address: ADDRESS, port: 0, namespace, link };
        let (name, link) = (&far.namespace, &far.link);
        ip(&format!("netns add {name}"))?;
        ip(&format!("link add {link} type veth peer name far netns {name}"))?;
        ip(&format!("-n {name} address add {ADDRESS}/32 dev far"))?;
        ip(&format!("-n {name} address add {ROUTER}/32 dev far"))?;
        ip(&format!("-n {name} link set far up"))?;
        ip(&format!("-n {name} route add default dev far"))?;
        ip(&format!("link set {link} up"))?;
        ip(&format!("route add {ADDRESS}/32 via {ROUTER} dev {link} onlink"))?;
        let place = File::open(format!("/run/netns/{name}")).map_err(|error| error.to_string())?;
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || listen(&place, &tell));
        let port = told.recv().map_err(|error| error.to_string())?;
        far.port = port.map_err(|error| format!("listen in the namespace: {error}"))?;
        Ok(far)
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        for arguments in [["link", "delete", &self.link], ["netns", "delete", &self.namespace]] {
            let _ = Command::new("ip").args(arguments).output();
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let done = Command::new("ip").args(arguments.split(' ')).output();
    let done = done.map_err(|error| format!("ip: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&done.stderr);
    Err(format!("ip {arguments}: {} (it needs root, on the daemon's host)", why.trim()))
}

fn listen(place: &File, tell: &Sender<io::Result<u16>>) {
    let open = || {
        move_into_link_name_space(place.as_fd(), Some(LinkNameSpaceType::Network))?;
        let listener = TcpListener::bind((ADDRESS, 0))?;
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    };
    let listener = match open() {
        Ok((listener, port)) => {
            let _ = tell.send(Ok(port));
            listener
        }
        Err(error) => {
            let _ = tell.send(Err(error));
            return;
        }
    };
    for stream in listener.incoming().flatten() {
        // A thread for each; an end of one is nobody's concern.
        std::thread::spawn(move || serve(stream));
    }
}

fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut order = [0];
    loop {
        stream.read_exact(&mut order)?;
        if order == [1] {
            stream.write_all(&order)?;
            continue;
        }
        let mut length = [0; 8];
        stream.read_exact(&mut length)?;
        let zeros = io::repeat(0).take(u64::from_be_bytes(length));
        io::copy(&mut io::BufReader::with_capacity(CHUNK, zeros), &mut stream)?;
    }
}
