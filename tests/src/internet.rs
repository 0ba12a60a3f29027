//! A small internet for sandboxes: a namespace with public addresses (of the range for documentation)
//! that has a name server, web servers with and without TLS, and echoes.
//!
//! Every name below `.test` that was told is there; the certificate is valid for all of them and for the
//! address, signed by a CA of its own. What is published there is given out. Whatever a web server is asked
//! is written down; `/kept` gives all of it back, and `/packed` does so compressed, whatever was asked for.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tempfile::TempDir;

/// The next hop, known to nobody but that link.
const ROUTER: &str = "192.168.255.253";
/// Where a web server speaks TLS besides 443.
pub const TLS_PORT: u16 = 8443;
/// Where whoever connects is greeted, before it says a word, and hears again what it says.
pub const ECHO_PORT: u16 = 8000;
/// Longest head of a request.
const HEAD_MAX: usize = 64 * 1024;

type Files = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// The namespace, and what happened in it. Dropping it removes it.
pub struct Internet {
    name: String,
    link: String,
    /// Where all of it is.
    pub address: Ipv4Addr,
    /// Another address of the same host, which no name leads to.
    pub other: Ipv4Addr,
    names: Arc<Mutex<BTreeMap<String, Ipv4Addr>>>,
    /// Questions for names.
    pub asked: Arc<Mutex<Vec<String>>>,
    /// What web servers were asked: heads and bodies.
    pub requests: Arc<Mutex<Vec<String>>>,
    /// What is given out, by its path.
    files: Files,
    /// Who connected.
    pub peers: Arc<Mutex<Vec<IpAddr>>>,
    dir: TempDir,
}

impl Internet {
    /// With these names.
    pub fn with(names: &[&str]) -> Self {
        let pid = std::process::id();
        let dir =
            tempfile::Builder::new().prefix("torpor-internet-").tempdir().expect("a directory");
        let mut internet = Self {
            name: format!("tp-internet-{pid}"),
            link: format!("tpi{pid}"),
            address: Ipv4Addr::UNSPECIFIED,
            other: Ipv4Addr::UNSPECIFIED,
            names: Arc::default(),
            asked: Arc::default(),
            requests: Arc::default(),
            files: Arc::default(),
            peers: Arc::default(),
            dir,
        };
        internet.connect();
        for name in names {
            internet.point(name, internet.address);
        }
        internet.serve(names);
        internet
    }

    /// From now on a name leads there.
    pub fn point(&self, name: &str, to: Ipv4Addr) {
        self.names.lock().insert(name.to_owned(), to);
    }

    /// From now on web servers have this file.
    pub fn publish(&self, path: &str, content: impl Into<Vec<u8>>) {
        self.files.lock().insert(path.to_owned(), content.into());
    }

    /// A file with the certificate of its CA.
    pub fn roots(&self) -> PathBuf {
        self.dir.path().join("roots.pem")
    }

    pub fn resolver(&self) -> String {
        format!("{}:53", self.address)
    }

    fn connect(&mut self) {
        let Self { name, link, .. } = &*self;
        ip(&format!("netns add {name}"));
        ip(&format!("link add {link} type veth peer name far netns {name}"));
        ip(&format!("-n {name} link set far up"));
        ip(&format!("link set {link} up"));
        // Behind a router, because nobody reaches the neighbours of the host. Whose route is there first
        // has the address: other tests have internets at the same time.
        let routed = |address: Ipv4Addr| {
            try_ip(&format!("route add {address}/32 via {ROUTER} dev {link} onlink"))
                .status
                .success()
        };
        let number = (1..=126).find(|number| routed(Ipv4Addr::new(198, 51, 100, 128 | number)));
        let number = number.expect("an address that nobody has");
        let (address, other) =
            (Ipv4Addr::new(198, 51, 100, 128 | number), Ipv4Addr::new(203, 0, 113, number));
        assert!(routed(other), "it goes with the first");
        for address in [address.to_string(), other.to_string(), ROUTER.to_owned()] {
            ip(&format!("-n {name} address add {address}/32 dev far"));
        }
        ip(&format!("-n {name} route add default dev far"));
        (self.address, self.other) = (address, other);
    }

    fn serve(&self, names: &[&str]) {
        let mut names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        names.push(self.address.to_string());
        let tls = Arc::new(certificate(names, &self.roots()));
        let (plain, files) = (Arc::clone(&self.requests), Arc::clone(&self.files));
        self.listen(80, move |stream| answer(stream, &plain, &files));
        for port in [443, TLS_PORT] {
            let (tls, requests) = (Arc::clone(&tls), Arc::clone(&self.requests));
            let files = Arc::clone(&self.files);
            self.listen(port, move |stream| {
                let session =
                    ServerConnection::new(Arc::clone(&tls)).expect("a sound configuration");
                answer(StreamOwned::new(session, stream), &requests, &files);
            });
        }
        self.listen(ECHO_PORT, |mut stream| {
            let _ = stream.write_all(b"hello\n");
            let Ok(mut reader) = stream.try_clone() else { return };
            let _ = std::io::copy(&mut reader, &mut stream);
        });
        self.listen_for_names();
        self.echo_datagrams(443);
        self.echo_datagrams(ECHO_PORT);
    }

    /// Runs `work` on a thread inside, once it is told to be ready.
    fn inside<S: Send + 'static>(
        &self,
        open: impl FnOnce() -> S + Send + 'static,
        work: impl FnOnce(S) + Send + 'static,
    ) {
        let place = File::open(format!("/run/netns/{}", self.name)).expect("our own namespace");
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            move_into_link_name_space(place.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("we may enter");
            drop(place);
            let socket = open();
            tell.send(()).expect("somebody waits");
            work(socket);
        });
        told.recv().expect("the thread lives");
    }

    fn listen(&self, port: u16, serve: impl Fn(TcpStream) + Send + Sync + 'static) {
        let open = move || TcpListener::bind(("0.0.0.0", port)).expect("a free port");
        let (serve, peers) = (Arc::new(serve), Arc::clone(&self.peers));
        self.inside(open, move |listener| {
            for stream in listener.incoming().flatten() {
                peers.lock().extend(stream.peer_addr().map(|peer| peer.ip()));
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || serve(stream));
            }
        });
    }

    fn echo_datagrams(&self, port: u16) {
        let open = move || UdpSocket::bind(("0.0.0.0", port)).expect("a free port");
        self.inside(open, |socket| {
            let mut bytes = [0; 2048];
            while let Ok((length, peer)) = socket.recv_from(&mut bytes) {
                let _ = socket.send_to(&bytes[..length], peer);
            }
        });
    }

    fn listen_for_names(&self) {
        let address = self.address;
        let (names, asked) = (Arc::clone(&self.names), Arc::clone(&self.asked));
        let open = move || UdpSocket::bind((address, 53)).expect("a free port");
        self.inside(open, move |socket| {
            let mut bytes = [0; 2048];
            while let Ok((length, peer)) = socket.recv_from(&mut bytes) {
                let Some((name, answer)) = resolve(&bytes[..length], &names.lock()) else {
                    continue;
                };
                asked.lock().push(name);
                let _ = socket.send_to(&answer, peer);
            }
        });
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        for arguments in [["link", "delete", &self.link], ["netns", "delete", &self.name]] {
            let _ = Command::new("ip").args(arguments).output();
        }
    }
}

fn try_ip(arguments: &str) -> Output {
    Command::new("ip").args(arguments.split(' ')).output().expect("iproute2")
}

fn ip(arguments: &str) {
    let output = try_ip(arguments);
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

/// A certificate for all names and addresses, whose CA is written to `roots`.
fn certificate(names: Vec<String>, roots: &Path) -> ServerConfig {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "a CA of this internet");
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().expect("a key");
    let ca = params.self_signed(&key).expect("a certificate");
    std::fs::write(roots, ca.pem()).expect("our own directory");
    let issuer = Issuer::new(params, key);
    let mut params = CertificateParams::new(names).expect("names");
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate().expect("a key");
    let leaf = params.signed_by(&key, &issuer).expect("a certificate");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("usual versions")
        .with_no_client_auth()
        .with_single_cert(
            vec![leaf.der().clone()],
            PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        )
        .expect("they belong together")
}

/// Writes the request down and answers, over and over; `/to/HOST` leads there, `/kept` and `/packed` to what
/// was written down before.
fn answer(mut stream: impl Read + Write, requests: &Mutex<Vec<String>>, files: &Files) {
    let mut unread = Vec::new();
    while let Some(request) = read_request(&mut stream, &mut unread) {
        let head = request.split("\r\n\r\n").next().unwrap_or_default();
        let first = head.lines().next().unwrap_or_default().to_owned();
        let kept = requests.lock().concat();
        requests.lock().push(request);
        let path = first.split(' ').nth(1).unwrap_or_default();
        let usual = format!("the world answers {first}\n").into_bytes();
        let file = files.lock().get(path).cloned();
        let (status, body) = match (path, path.split_once("/to/")) {
            _ if file.is_some() => {
                (format!("200 OK\r\ncontent-type: {}", kind(path)), file.unwrap_or_default())
            }
            ("/kept", _) => ("200 OK".to_owned(), kept.into_bytes()),
            ("/packed", _) => ("200 OK\r\ncontent-encoding: gzip".to_owned(), packed(&kept)),
            (_, Some((_, place))) => (format!("302 Found\r\nlocation: http://{place}/"), usual),
            (_, None) => ("200 OK".to_owned(), usual),
        };
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
        let answer = [head.as_bytes(), &body].concat();
        if stream.write_all(&answer).and_then(|()| stream.flush()).is_err() {
            return;
        }
    }
}

/// Directories are pages, files with an ending are bytes, all else is JSON.
fn kind(path: &str) -> &'static str {
    match path.rsplit('/').next() {
        Some("") | None => "text/html",
        Some(name) if name.contains('.') => "application/octet-stream",
        Some(_) => "application/json",
    }
}

fn packed(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).expect("memory");
    encoder.finish().expect("memory")
}

fn read_request(stream: &mut impl Read, unread: &mut Vec<u8>) -> Option<String> {
    let mut more = |unread: &mut Vec<u8>| {
        let mut bytes = [0; 4096];
        let length = stream.read(&mut bytes).ok().filter(|length| *length > 0)?;
        unread.extend_from_slice(&bytes[..length]);
        Some(())
    };
    let end = loop {
        if let Some(end) = unread.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        assert!(unread.len() < HEAD_MAX, "a head without end");
        more(unread)?;
    };
    let head = String::from_utf8_lossy(&unread[..end]).to_ascii_lowercase();
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    let end = end + length.unwrap_or(0);
    while unread.len() < end {
        more(unread)?;
    }
    let rest = unread.split_off(end);
    let request = std::mem::replace(unread, rest);
    Some(String::from_utf8_lossy(&request).into_owned())
}

/// The name that is asked for, and the answer: an address, or that there is none.
fn resolve(question: &[u8], names: &BTreeMap<String, Ipv4Addr>) -> Option<(String, Vec<u8>)> {
    let mut labels = Vec::new();
    let mut rest = question.get(12..)?;
    loop {
        let (&length, after) = rest.split_first()?;
        rest = after;
        if length == 0 {
            break;
        }
        let label = rest.get(..usize::from(length))?;
        labels.push(String::from_utf8_lossy(label).to_ascii_lowercase());
        rest = &rest[usize::from(length)..];
    }
    let (name, kind) = (labels.join("."), rest.get(..2)?);
    let end = question.len() - rest.len() + 4;
    let address = names.get(&name);
    let found = address.filter(|_| kind == [0, 1]);
    let code = if address.is_some() { 0x80 } else { 0x83 };
    let mut answer = question[..2].to_vec();
    answer.extend([0x81, code, 0, 1, 0, u8::from(found.is_some()), 0, 0, 0, 0]);
    answer.extend(&question[12..end]);
    if let Some(address) = found {
        // The name again, an address of the internet, for a minute, four bytes.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        answer.extend(address.octets());
    }
    Some((name, answer))
}
