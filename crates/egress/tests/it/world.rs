//! A host with guests: fake resolver, fake vault, real proxy.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;
use torpor_egress::{Egress, InterceptionCa, Listener, OriginalDestination, Settings};
use torpor_lifecycle::engine::{EgressProxy, GuestRegistry as _};
use torpor_lifecycle::store::{BoundSecret, StoreError, Vault};
use torpor_protocol::egress::{EgressEvent, EgressKind, Verdict};
use torpor_protocol::{Network, SandboxId, SecretName};

/// Nothing here takes this long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
/// Where servers of the tests listen; private, and opened by the policies of the tests.
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// An address that nobody has.
pub(crate) const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 66);

/// What the fake resolver answers.
#[derive(Default)]
pub(crate) struct Zone {
    /// Addresses of names.
    pub(crate) hosts: HashMap<String, Vec<Ipv4Addr>>,
    pub(crate) aliases: HashMap<String, String>,
    /// Names that are never answered.
    pub(crate) mute: Vec<String>,
    /// Names that were asked for.
    pub(crate) asked: Vec<String>,
}

pub(crate) struct World {
    pub(crate) egress: Egress,
    pub(crate) listening: Option<Listener>,
    pub(crate) zone: Arc<Mutex<Zone>>,
    pub(crate) guest: Guest,
    pub(crate) ca: Arc<InterceptionCa>,
    tasks: JoinSet<()>,
    _dir: tempfile::TempDir,
}

/// A sandbox, by its address.
#[derive(Clone)]
pub(crate) struct Guest {
    pub(crate) address: Ipv4Addr,
    pub(crate) id: SandboxId,
    acceptor: SocketAddr,
    names: SocketAddr,
    wanted: Wanted,
}

/// Where connections wanted to go, by where they come from.
type Wanted = Arc<Mutex<HashMap<SocketAddr, SocketAddrV4>>>;

#[derive(Clone, Default)]
pub(crate) struct FakeVault(Arc<Mutex<BTreeMap<String, BoundSecret>>>);

impl FakeVault {
    /// From now on there is this secret, bound to this.
    pub(crate) fn set(&self, name: &str, value: &str, host: &str) {
        let secret = BoundSecret { value: value.to_owned(), hosts: vec![host.parse().unwrap()] };
        self.0.lock().insert(name.to_owned(), secret);
    }
}

#[async_trait]
impl Vault for FakeVault {
    async fn reveal(&self, names: &[SecretName]) -> Result<BTreeMap<String, String>, StoreError> {
        let one = |name: &SecretName| match self.0.lock().get(&name.to_string()) {
            Some(secret) => Ok((name.to_string(), secret.value.clone())),
            None => Err(StoreError::NoSuchSecret(name.to_string())),
        };
        names.iter().map(one).collect()
    }

    async fn bound(&self, name: &SecretName) -> Result<Option<BoundSecret>, StoreError> {
        Ok(self.0.lock().get(&name.to_string()).cloned())
    }
}

impl World {
    /// One guest under this policy.
    pub(crate) async fn new(policy: &str) -> Self {
        Self::with(policy, Settings::default(), FakeVault::default()).await
    }

    pub(crate) async fn with(policy: &str, mut settings: Settings, vault: FakeVault) -> Self {
        let mut tasks = JoinSet::new();
        let zone = Arc::new(Mutex::new(Zone::default()));
        settings.resolver = Some(resolver(&mut tasks, Arc::clone(&zone)).await);
        settings.private = vec!["127.0.0.0/8".parse().unwrap()];
        let dir = tempfile::tempdir().unwrap();
        let ca = Arc::new(InterceptionCa::open(dir.path()).unwrap());
        let egress = Egress::new(settings, Arc::clone(&ca), Arc::new(vault)).unwrap();
        let wanted = Wanted::default();
        let listening = listen(&egress, &wanted);
        let guest = Guest {
            address: Ipv4Addr::new(127, 9, 0, 2),
            id: SandboxId::random(),
            acceptor: listening.connections(),
            names: listening.names(),
            wanted,
        };
        let listening = Some(listening);
        let world = Self { egress, listening, zone, guest, ca, tasks, _dir: dir };
        world.set_policy(policy);
        world
    }

    pub(crate) fn set_policy(&self, policy: &str) {
        self.egress.register(self.guest.address, &self.guest.id, &network(policy));
    }

    /// The resolver knows these addresses for this name.
    pub(crate) fn host(&self, name: &str, addresses: &[Ipv4Addr]) {
        self.zone.lock().hosts.insert(name.to_owned(), addresses.to_vec());
    }

    pub(crate) fn alias(&self, name: &str, of: &str) {
        self.zone.lock().aliases.insert(name.to_owned(), of.to_owned());
    }

    /// A server at [`SERVER`] that does this with each connection; its port and how many came.
    pub(crate) async fn server<F>(&mut self, serve: fn(TcpStream) -> F) -> (u16, Arc<AtomicUsize>)
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let listener = TcpListener::bind((SERVER, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        self.tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::Relaxed);
                open.spawn(serve(stream));
            }
        });
        (port, count)
    }

    /// Runs beside the test, and ends with it.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// The first event like this, as soon as there is one.
    pub(crate) async fn event(&self, what: EgressKind, verdict: Verdict) -> Arc<EgressEvent> {
        let mut follower = self.egress.audit().follow();
        let fits = |event: &Arc<EgressEvent>| event.what == what && event.verdict == verdict;
        let known = self.egress.audit().recent(&self.guest.id, usize::MAX);
        if let Some(event) = known.into_iter().find(fits) {
            return event;
        }
        let told = async {
            loop {
                let event = follower.recv().await.unwrap();
                if fits(&event) {
                    return event;
                }
            }
        };
        let recent = || self.egress.audit().recent(&self.guest.id, usize::MAX);
        timeout(DEADLINE, told).await.unwrap_or_else(|_| panic!("only {:?}", recent()))
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        self.zone.lock().asked.clone()
    }
}

pub(crate) fn network(policy: &str) -> Network {
    serde_json::from_str(policy).unwrap()
}

/// A proxy on free ports. Of those for names UDP may be taken: then others are tried.
fn listen(egress: &Egress, wanted: &Wanted) -> Listener {
    let wanted = Arc::clone(wanted);
    let original_destination: OriginalDestination = Arc::new(move |stream| {
        let from = stream.peer_addr()?;
        wanted.lock().get(&from).copied().ok_or(io::ErrorKind::NotFound.into())
    });
    let proxy = EgressProxy {
        address: Ipv4Addr::LOCALHOST,
        connections: 0,
        names: 0,
        public_mark: 0,
        private_mark: 0,
    };
    loop {
        match egress.listen_with(proxy, Arc::clone(&original_destination)) {
            Ok(listening) => return listening,
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::AddrInUse),
        }
    }
}

impl Guest {
    /// A connection that wanted to go there.
    pub(crate) async fn connect(&self, to: Ipv4Addr, port: u16) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((self.address, 0).into()).unwrap();
        let here = socket.local_addr().unwrap();
        self.wanted.lock().insert(here, SocketAddrV4::new(to, port));
        socket.connect(self.acceptor).await.unwrap()
    }

    /// A connection to the proxy itself.
    pub(crate) async fn connect_directly(&self) -> TcpStream {
        let SocketAddr::V4(acceptor) = self.acceptor else { unreachable!() };
        self.connect(*acceptor.ip(), acceptor.port()).await
    }

    pub(crate) fn at(&self, address: Ipv4Addr) -> Self {
        Self { address, ..self.clone() }
    }

    /// Asks for a name.
    pub(crate) async fn ask(&self, name: &str, kind: RecordType) -> Message {
        self.ask_bytes(&question(name, kind).to_vec().unwrap()).await
    }

    pub(crate) async fn ask_bytes(&self, question: &[u8]) -> Message {
        let socket = self.name_socket().await;
        socket.send(question).await.unwrap();
        received(&socket).await
    }

    pub(crate) async fn name_socket(&self) -> UdpSocket {
        let socket = UdpSocket::bind((self.address, 0)).await.unwrap();
        socket.connect(self.names).await.unwrap();
        socket
    }

    /// The same by TCP.
    pub(crate) async fn ask_by_tcp(&self, name: &str, kind: RecordType) -> Message {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((self.address, 0).into()).unwrap();
        let mut stream = socket.connect(self.names).await.unwrap();
        let question = question(name, kind).to_vec().unwrap();
        stream.write_u16(question.len().try_into().unwrap()).await.unwrap();
        stream.write_all(&question).await.unwrap();
        let answer = async {
            let mut answer = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut answer).await.unwrap();
            answer
        };
        Message::from_vec(&timeout(DEADLINE, answer).await.unwrap()).unwrap()
    }

    /// Sends a request on a new connection and returns all of the answer.
    pub(crate) async fn http(&self, to: Ipv4Addr, port: u16, request: &str) -> String {
        let mut stream = self.connect(to, port).await;
        stream.write_all(request.as_bytes()).await.unwrap();
        String::from_utf8(all(&mut stream).await.unwrap()).unwrap()
    }
}

pub(crate) fn question(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(4711, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

pub(crate) async fn received(socket: &UdpSocket) -> Message {
    let mut buffer = [0; 4096];
    let length = timeout(DEADLINE, socket.recv(&mut buffer)).await.unwrap().unwrap();
    Message::from_vec(&buffer[..length]).unwrap()
}

/// The addresses that an answer tells.
pub(crate) fn addresses(answer: &Message) -> Vec<Ipv4Addr> {
    let address = |record: &Record| {
        if let RData::A(address) = &record.data { Some(address.0) } else { None }
    };
    answer.answers.iter().filter_map(address).collect()
}

/// All that comes until the end; an error if it is cut.
pub(crate) async fn all(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    timeout(DEADLINE, stream.read_to_end(&mut bytes)).await.unwrap()?;
    Ok(bytes)
}

/// The connection is reset, and not a byte came before.
pub(crate) async fn assert_reset(stream: &mut TcpStream) {
    let mut byte = [0];
    let ended = timeout(DEADLINE, stream.read(&mut byte)).await.expect("it goes on");
    assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

/// The connection ends, one way or the other.
pub(crate) async fn assert_cut(stream: &mut TcpStream) {
    let mut byte = [0];
    let ended = timeout(DEADLINE, stream.read(&mut byte)).await.expect("it goes on");
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
}

/// Gives back what it gets, and says first that it is there.
pub(crate) async fn greet_and_echo(mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(b"hi\n").await?;
    echo(stream).await
}

/// Gives back what it gets.
pub(crate) async fn echo(mut stream: TcpStream) -> io::Result<()> {
    let (mut from, mut to) = stream.split();
    tokio::io::copy(&mut from, &mut to).await?;
    to.shutdown().await
}

/// Answers each request with its first line and its host.
pub(crate) async fn web<S>(mut stream: S) -> io::Result<()>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let mut head = Vec::new();
    loop {
        let byte = stream.read_u8().await?;
        head.push(byte);
        if head.ends_with(b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&head);
            let host = |line: &&str| line.to_ascii_lowercase().starts_with("host:");
            let line = text.lines().next().unwrap_or_default();
            let body = format!("{line} | {}", text.lines().find(host).unwrap_or_default());
            let length = body.len();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).await?;
            head.clear();
        }
    }
}

/// The fake resolver; where it is.
async fn resolver(tasks: &mut JoinSet<()>, zone: Arc<Mutex<Zone>>) -> SocketAddr {
    let (udp, tcp) = loop {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()).await {
            break (udp, tcp);
        }
    };
    let address = udp.local_addr().unwrap();
    let by_tcp = Arc::clone(&zone);
    tasks.spawn(async move {
        let mut buffer = [0; 4096];
        while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
            let Some(answer) = zone.lock().answer(&buffer[..length]) else { continue };
            let bytes = answer.to_vec().unwrap();
            let bytes = if bytes.len() > 512 { truncated(&answer) } else { bytes };
            udp.send_to(&bytes, from).await.unwrap();
        }
    });
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let mut question = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut question).await.unwrap();
            let bytes = by_tcp.lock().answer(&question).unwrap().to_vec().unwrap();
            stream.write_u16(bytes.len().try_into().unwrap()).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
        }
    });
    address
}

fn truncated(answer: &Message) -> Vec<u8> {
    let mut short = answer.clone();
    short.answers.clear();
    short.metadata.truncation = true;
    short.to_vec().unwrap()
}

impl Zone {
    fn answer(&mut self, question: &[u8]) -> Option<Message> {
        let question = Message::from_vec(question).unwrap();
        let query = &question.queries[0];
        let name = query.name().to_ascii().to_ascii_lowercase();
        let name = name.trim_end_matches('.').to_owned();
        self.asked.push(name.clone());
        if self.mute.contains(&name) {
            return None;
        }
        let mut answer = question.clone().into_response();
        answer.edns = None;
        let mut owner = name;
        while let Some(target) = self.aliases.get(&owner) {
            let data = RData::CNAME(CNAME(fqdn(target)));
            answer.add_answer(Record::from_rdata(fqdn(&owner), 1, data));
            owner.clone_from(target);
        }
        match self.hosts.get(&owner) {
            Some(addresses) => addresses.iter().for_each(|address| {
                let data = RData::A(A(*address));
                answer.add_answer(Record::from_rdata(fqdn(&owner), 1, data));
            }),
            None => answer.metadata.response_code = ResponseCode::NXDomain,
        }
        Some(answer)
    }
}

fn fqdn(name: &str) -> Name {
    Name::from_ascii(format!("{name}.")).unwrap()
}
