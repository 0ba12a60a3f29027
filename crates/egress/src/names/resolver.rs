//! Asking the resolver of this host, with a small memory.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// How long one try waits for an answer.
const TRY: Duration = Duration::from_millis(1500);
/// Tries; all of them together take less than the five seconds that most programs wait.
const TRIES: usize = 3;
/// How long an answer is used again, whatever it says itself: at least, so that one connection sees one
/// answer, and at most.
const CACHED: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// Answers that are remembered; then all are asked for anew.
const ANSWERS_MAX: usize = 4096;
/// Questions that wait for an answer at the same time, of all guests: each has a socket.
const QUESTIONS_MAX: usize = 1024;
/// Bytes of an answer by UDP: fits every path.
const PAYLOAD: u16 = 1232;
/// How long the host's own configuration is believed.
const CONFIGURATION: Duration = Duration::from_secs(30);
/// Where the host says whom it asks.
const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS_PORT: u16 = 53;

/// Why there is no address for a name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unresolved {
    #[error("there is no host {0}")]
    UnknownName(String),
    #[error("the host {0} has no IPv4 address")]
    Addressless(String),
    #[error("the resolver of this host does not answer for {0}")]
    Unanswered(String),
}

/// What the resolver said.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: ResponseCode,
    pub(crate) records: Vec<Record>,
}

pub(crate) struct Resolver {
    whom: Whom,
    known: Mutex<HashMap<(Name, RecordType), Known>>,
    questions: Semaphore,
}

struct Known {
    answer: Arc<Answer>,
    until: Instant,
}

/// Who is asked.
enum Whom {
    Fixed(SocketAddr),
    /// Whom the host asks, as it said at that time.
    Host(Mutex<Option<(SocketAddr, Instant)>>),
}

impl Resolver {
    pub(crate) fn new(resolver: Option<SocketAddr>) -> Self {
        let whom = resolver.map_or_else(|| Whom::Host(Mutex::default()), Whom::Fixed);
        Self { whom, known: Mutex::default(), questions: Semaphore::new(QUESTIONS_MAX) }
    }

    /// The IPv4 addresses of a host. At least one.
    pub(crate) async fn addresses(&self, host: &str) -> Result<Vec<Ipv4Addr>, Unresolved> {
        let no_name = || Unresolved::UnknownName(host.to_owned());
        let mut name = Name::from_ascii(host).map_err(|_| no_name())?;
        name.set_fqdn(true);
        let no_answer = |_| Unresolved::Unanswered(host.to_owned());
        let answer = self.ask(&name, RecordType::A).await.map_err(no_answer)?;
        if answer.code == ResponseCode::NXDomain {
            return Err(no_name());
        }
        if answer.code != ResponseCode::NoError {
            return Err(Unresolved::Unanswered(host.to_owned()));
        }
        let addresses: Vec<_> = answer.addresses().map(|(address, _)| address).collect();
        match addresses.is_empty() {
            true => Err(Unresolved::Addressless(host.to_owned())),
            false => Ok(addresses),
        }
    }

    /// What the resolver says about this name, or said a moment ago.
    pub(crate) async fn ask(&self, name: &Name, kind: RecordType) -> io::Result<Arc<Answer>> {
        let key = (name.to_lowercase(), kind);
        let now = Instant::now();
        if let Some(known) = self.known.lock().get(&key).filter(|known| known.until > now) {
            return Ok(Arc::clone(&known.answer));
        }
        let _one = self.questions.acquire().await.map_err(io::Error::other)?;
        let message = question(&key.0, kind)?;
        let answer = Arc::new(ask(self.whom.address()?, &message).await?);
        let until = Instant::now() + answer.lasts();
        let mut known = self.known.lock();
        if known.len() >= ANSWERS_MAX {
            known.clear();
        }
        known.insert(key, Known { answer: Arc::clone(&answer), until });
        Ok(answer)
    }
}

impl Answer {
    /// Its IPv4 addresses and for how long each is good. They belong to the name that was asked for, by
    /// whatever other names the resolver came to them.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = (Ipv4Addr, Duration)> {
        self.records.iter().filter_map(|record| {
            let ttl = Duration::from_secs(record.ttl.into());
            address(record).map(|address| (address, ttl))
        })
    }

    fn lasts(&self) -> Duration {
        let shortest = self.records.iter().map(|record| record.ttl).min().unwrap_or(0);
        Duration::from_secs(shortest.into()).clamp(CACHED.0, CACHED.1)
    }
}

/// The address that a record tells, if it does.
pub(super) fn address(record: &Record) -> Option<Ipv4Addr> {
    if let RData::A(address) = &record.data { Some(address.0) } else { None }
}

impl Whom {
    fn address(&self) -> io::Result<SocketAddr> {
        let cached = match self {
            Self::Fixed(address) => return Ok(*address),
            Self::Host(cached) => cached,
        };
        let mut cached = cached.lock();
        if let Some((address, at)) = *cached
            && at.elapsed() < CONFIGURATION
        {
            return Ok(address);
        }
        let text = std::fs::read_to_string(RESOLV_CONF)?;
        let address = first_server(&text)
            .ok_or_else(|| io::Error::other(format!("{RESOLV_CONF} names no server")))?;
        *cached = Some((address, Instant::now()));
        Ok(address)
    }
}

/// The first name server in the text of `resolv.conf`.
fn first_server(text: &str) -> Option<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_whitespace();
        let named = words.next()? == "nameserver";
        let address: IpAddr = words.next().filter(|_| named)?.parse().ok()?;
        Some(SocketAddr::new(address, DNS_PORT))
    };
    text.lines().find_map(server)
}

/// One question. Its id is random.
pub(super) fn question(name: &Name, kind: RecordType) -> io::Result<Message> {
    let mut id = [0; 2];
    getrandom::fill(&mut id).map_err(io::Error::other)?;
    let mut message = Message::new(u16::from_be_bytes(id), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name.clone(), kind));
    let mut edns = Edns::new();
    edns.set_max_payload(PAYLOAD);
    message.set_edns(edns);
    Ok(message)
}

/// By UDP, several times; by TCP if the answer is too long for it.
async fn ask(whom: SocketAddr, question: &Message) -> io::Result<Answer> {
    let bytes = question.to_vec().map_err(io::Error::other)?;
    for _ in 0..TRIES {
        let Ok(answer) = timeout(TRY, by_udp(whom, question, &bytes)).await else { continue };
        let answer = answer?;
        if !answer.metadata.truncation {
            return Ok(Answer::of(answer));
        }
        let answer = timeout(TRY, by_tcp(whom, question, &bytes)).await??;
        return Ok(Answer::of(answer));
    }
    Err(io::ErrorKind::TimedOut.into())
}

impl Answer {
    fn of(message: Message) -> Self {
        Self { code: message.metadata.response_code, records: message.answers }
    }
}

/// From a port of its own, which the kernel chooses, and from nobody else than who was asked.
async fn by_udp(whom: SocketAddr, question: &Message, bytes: &[u8]) -> io::Result<Message> {
    let here: IpAddr = match whom {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((here, 0)).await?;
    socket.connect(whom).await?;
    socket.send(bytes).await?;
    let mut buffer = vec![0; 4096];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if let Some(answer) = answers(question, &buffer[..length]) {
            return Ok(answer);
        }
    }
}

async fn by_tcp(whom: SocketAddr, question: &Message, bytes: &[u8]) -> io::Result<Message> {
    let mut stream = TcpStream::connect(whom).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes].concat()).await?;
    let length = stream.read_u16().await?;
    let mut buffer = vec![0; length.into()];
    stream.read_exact(&mut buffer).await?;
    answers(question, &buffer).ok_or_else(|| io::Error::other("that is no answer"))
}

/// The message, if it answers this question.
pub(super) fn answers(question: &Message, bytes: &[u8]) -> Option<Message> {
    let answer = Message::from_vec(bytes).ok()?;
    let fits = answer.metadata.id == question.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && answer.queries == question.queries;
    fits.then_some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_server_of_the_host_is_asked() {
        let text =
            "# nameserver 192.0.2.1\nsearch example\nnameserver 127.0.0.53\nnameserver ::1\n";
        assert_eq!(first_server(text), Some("127.0.0.53:53".parse().unwrap()));
        assert_eq!(first_server("search example\n"), None);
    }

    #[test]
    fn only_a_message_with_the_same_id_and_question_is_an_answer() {
        let name = Name::from_ascii("a.test.").unwrap();
        let question = question(&name, RecordType::A).unwrap();
        let mut answer = question.clone().into_response();
        assert!(answers(&question, &answer.to_vec().unwrap()).is_some());
        answer.metadata.id ^= 1;
        assert!(answers(&question, &answer.to_vec().unwrap()).is_none());
        answer.metadata.id ^= 1;
        answer.queries = vec![Query::query(Name::from_ascii("b.test.").unwrap(), RecordType::A)];
        assert!(answers(&question, &answer.to_vec().unwrap()).is_none());
        assert!(answers(&question, &question.to_vec().unwrap()).is_none());
    }
}
