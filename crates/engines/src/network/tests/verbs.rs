//! What tests do with guests, and how they see what became of it.

use std::io::{self, ErrorKind, Read, Write};
use std::mem::size_of;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, recv, sendto,
    socket_with, sockopt,
};
use torpor_lifecycle::engine::EgressProxy;
use torpor_protocol::{Destination, Network as Policy};

use super::world::{Place, greeting};

/// For what must come.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn policy(internet: bool, allow: &[&str], deny: &[&str]) -> Policy {
    let entries = |texts: &[&str]| -> Vec<Destination> {
        texts.iter().map(|text| text.parse().expect("an entry")).collect()
    };
    Policy { internet, allow: entries(allow), deny: entries(deny), ..Policy::CLOSED }
}

/// `Err` is a refusal; silence and anything else is a failure of the test.
pub(super) fn reaches(guest: &Place, address: Ipv4Addr) -> bool {
    match guest.connect(address) {
        Ok(mut stream) => {
            greeting(&mut stream).expect("a greeting");
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
            false
        }
    }
}

/// Whether a word comes back on a connection.
pub(super) fn says(stream: &mut TcpStream) -> Result<(), ErrorKind> {
    let mut back = [0; 5];
    let done = stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut back));
    done.map_err(|error| error.kind())
}

pub(super) fn nft(command: &str) {
    let mut nft = Command::new("nft");
    nft.env("PATH", crate::program::search_path()).arg(command);
    let output = nft.output().expect("nft runs");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A policy that needs somebody who reads names.
pub(super) fn proxied() -> Policy {
    policy(true, &[], &["example.com"])
}

/// Somebody at the egress proxy.
pub(super) struct Doorkeeper(TcpListener);

impl Doorkeeper {
    pub(super) fn new(proxy: EgressProxy) -> Self {
        let listener = TcpListener::bind((proxy.address, proxy.connections));
        let listener = listener.expect("the egress proxy's address is the host's");
        listener.set_nonblocking(true).expect("it need not wait");
        Self(listener)
    }

    /// The next who arrived, by the name it has on this host, and where it wanted to go. A connection
    /// is there as soon as the guest has it.
    pub(super) fn arrived(&self) -> Option<(TcpStream, Ipv4Addr, SocketAddrV4)> {
        match self.0.accept() {
            Ok((stream, from)) => {
                stream.set_nonblocking(false).expect("it may wait");
                stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
                let wanted = sockopt::ip_original_dst(&stream).expect("the kernel knows");
                let std::net::IpAddr::V4(from) = from.ip() else { panic!("{from} is no guest") };
                Some((stream, from, wanted))
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                None
            }
        }
    }
}

/// A connection of the host that carries a mark.
#[expect(unsafe_code, reason = "the option has no safe wrapper")]
pub(super) fn connect_marked(mark: u32, to: std::net::SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
    let length = libc::socklen_t::try_from(size_of::<u32>()).expect("four bytes");
    // SAFETY: the kernel reads `length` bytes at the pointer, which are the integer `mark`.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MARK,
            (&raw const mark).cast(),
            length,
        )
    };
    if done == -1 {
        return Err(io::Error::last_os_error());
    }
    rustix::net::connect(&socket, &to)?;
    Ok(socket.into())
}

/// A word each way on a connection through the egress proxy.
pub(super) fn talk(guest: &mut TcpStream, doorkeeper: &mut TcpStream) -> io::Result<()> {
    let mut word = [0; 5];
    guest.set_read_timeout(Some(PATIENCE))?;
    guest.write_all(b"hello")?;
    doorkeeper.read_exact(&mut word)?;
    doorkeeper.write_all(&word)?;
    guest.read_exact(&mut word)
}

/// Whether both ends of a connection through the egress proxy hear that it is cut.
pub(super) fn is_cut(guest: &mut TcpStream, doorkeeper: &mut TcpStream) -> bool {
    let reset = |error: io::Error| error.kind() == ErrorKind::ConnectionReset;
    // The first word is what finds out, on each side.
    let heard = doorkeeper.write_all(b"hello").and_then(|()| doorkeeper.read_exact(&mut [0]));
    says(guest) == Err(ErrorKind::ConnectionReset) && heard.is_err_and(reset)
}

/// Answers datagrams for ever with the address they came from.
pub(super) fn answer(socket: UdpSocket) {
    std::thread::spawn(move || {
        let mut question = [0; 512];
        while let Ok((_, from)) = socket.recv_from(&mut question) {
            let _ = socket.send_to(from.ip().to_string().as_bytes(), from);
        }
    });
}

/// Type and code of the answer to an echo request: 0 and 0, or why there is none.
pub(super) fn ping(guest: &Place, to: Ipv4Addr) -> (u8, u8) {
    let answer = guest.inside(|| {
        let kind = (AddressFamily::INET, SocketType::RAW);
        let protocol = Some(ipproto::ICMP);
        let socket: OwnedFd = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, protocol)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
        // Type, code, a checksum over all of it, and a number.
        let request = [8, 0, 0xf7, 0xfe, 0, 1, 0, 0];
        sendto(&socket, &request, SendFlags::empty(), &SocketAddrV4::new(to, 0))?;
        let mut packet = [0; 200];
        let (length, _) = recv(&socket, packet.as_mut_slice(), RecvFlags::empty())?;
        assert!(length > 22, "a header and an answer");
        Ok((packet[20], packet[21]))
    });
    answer.expect("an answer or a refusal, and no silence")
}
