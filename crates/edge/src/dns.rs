//! One question to a name server: which TXT records does a name have?
//!
//! What answers may be anybody: an answer counts only if it answers our question, is read within
//! limits, and says something about the name that was asked for, or what that is an alias of.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout, timeout_at};
use torpor_service::domains;

/// How long one server may take; resolvers ask others themselves.
const ANSWER_DEADLINE: Duration = Duration::from_secs(4);
/// Each server is asked so often: a datagram gets lost now and then.
const TRIES: usize = 2;
/// As many servers as a C library asks.
const SERVERS_MAX: usize = 3;
/// Largest datagram that we say we take, and do: no fragments on the way.
const DATAGRAM_MAX: u16 = 1232;
/// Texts of one name that are looked at; longer lists are no answer to anything.
const TEXTS_MAX: usize = 64;
/// Longest text that is kept of a record: our own is much shorter.
const TEXT_MAX: usize = 255;
/// Aliases that are followed within an answer.
const ALIASES_MAX: usize = 8;
/// Largest resolver configuration that is read.
const CONFIGURATION_MAX: u64 = 64 * 1024;

/// Where hosts say whom they ask.
const CONFIGURATION: &str = "/etc/resolv.conf";
const PORT: u16 = 53;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum DnsError {
    #[error("{0} can't be asked for")]
    BadName(String),
    #[error("this host has no name server in {}", .0.display())]
    NoServer(PathBuf),
    #[error("the name server {server} did not answer the question for {name}")]
    Silent { server: SocketAddr, name: String },
    #[error("the name server {server} could not be asked")]
    Unreachable {
        server: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("the name server {server} answered the question for {name} with {code}")]
    Refused { server: SocketAddr, name: String, code: ResponseCode },
    #[error("the answer of the name server {0} can't be read")]
    Garbled(SocketAddr),
}

/// Whom to ask.
#[derive(Debug, Clone)]
pub enum Resolver {
    Server(SocketAddr),
    /// Read each time: networks come and go.
    Host(PathBuf),
}

impl Resolver {
    pub fn new(server: Option<SocketAddr>) -> Self {
        server.map_or_else(|| Self::Host(CONFIGURATION.into()), Self::Server)
    }

    /// The TXT records of a name; none if it has none. The parts of each are put together.
    async fn ask(&self, name: &str) -> Result<Vec<String>, DnsError> {
        let question = question(name)?;
        let servers = match self {
            Self::Server(server) => vec![*server],
            Self::Host(path) => {
                let servers = servers(path).await;
                if servers.is_empty() {
                    return Err(DnsError::NoServer(path.clone()));
                }
                servers
            }
        };
        let mut last = None;
        for _ in 0..TRIES {
            for server in &servers {
                match ask(*server, &question, name).await {
                    Ok(texts) => return Ok(texts),
                    Err(error) => last = Some(error),
                }
            }
        }
        Err(last.unwrap_or_else(|| DnsError::BadName(name.to_owned())))
    }
}

#[async_trait]
impl domains::Resolver for Resolver {
    async fn texts(&self, name: &str) -> Result<Vec<String>, String> {
        self.ask(name).await.map_err(|error| torpor_lifecycle::chain(&error))
    }
}

async fn servers(path: &Path) -> Vec<SocketAddr> {
    let Ok(file) = tokio::fs::File::open(path).await else { return Vec::new() };
    let mut text = String::new();
    // Whatever can't be read names no server.
    let _ = file.take(CONFIGURATION_MAX).read_to_string(&mut text).await;
    let addresses = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse::<IpAddr>().ok())?
    });
    addresses.take(SERVERS_MAX).map(|address| SocketAddr::new(address, PORT)).collect()
}

fn question(name: &str) -> Result<Query, DnsError> {
    let bad = |_| DnsError::BadName(name.to_owned());
    let mut name = Name::from_ascii(name).map_err(bad)?;
    name.set_fqdn(true);
    Ok(Query::query(name, RecordType::TXT))
}

async fn ask(server: SocketAddr, question: &Query, name: &str) -> Result<Vec<String>, DnsError> {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(question.clone());
    let mut edns = Edns::new();
    edns.set_max_payload(DATAGRAM_MAX);
    message.set_edns(edns);
    let bytes = message.to_vec().map_err(|_| DnsError::BadName(name.to_owned()))?;
    let id = message.metadata.id;

    let silent = || DnsError::Silent { server, name: name.to_owned() };
    let unreachable = |source| DnsError::Unreachable { server, source };
    let answer = by_datagram(server, &bytes, id, question).await;
    let mut answer = answer.map_err(unreachable)?.ok_or_else(silent)?;
    if answer.metadata.truncation {
        let whole = timeout(ANSWER_DEADLINE, by_stream(server, &bytes)).await;
        let whole = whole.map_err(|_| silent())?.map_err(unreachable)?;
        let whole = Message::from_vec(&whole).map_err(|_| DnsError::Garbled(server))?;
        if !answers(&whole, id, question) || whole.metadata.truncation {
            return Err(DnsError::Garbled(server));
        }
        answer = whole;
    }
    read(&answer, question.name()).map_err(|code| DnsError::Refused {
        server,
        name: name.to_owned(),
        code,
    })
}

/// Waits for a datagram that answers our question; others do not end the wait.
async fn by_datagram(
    server: SocketAddr,
    bytes: &[u8],
    id: u16,
    question: &Query,
) -> io::Result<Option<Message>> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    // Only this server's datagrams come through.
    socket.connect(server).await?;
    socket.send(bytes).await?;
    let deadline = Instant::now() + ANSWER_DEADLINE;
    let mut buffer = [0; DATAGRAM_MAX as usize];
    loop {
        let Ok(read) = timeout_at(deadline, socket.recv(&mut buffer)).await else {
            return Ok(None);
        };
        match Message::from_vec(&buffer[..read?]) {
            Ok(message) if answers(&message, id, question) => return Ok(Some(message)),
            Ok(_) | Err(_) => {}
        }
    }
}

async fn by_stream(server: SocketAddr, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes].concat()).await?;
    let length = stream.read_u16().await?;
    let mut answer = vec![0; usize::from(length)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

fn answers(message: &Message, id: u16, question: &Query) -> bool {
    message.metadata.id == id
        && message.metadata.message_type == MessageType::Response
        && message.metadata.op_code == OpCode::Query
        && message.queries.as_slice() == [question.clone()]
}

/// The texts of the name, or of what it is an alias of.
fn read(message: &Message, asked: &Name) -> Result<Vec<String>, ResponseCode> {
    let code = message.metadata.response_code;
    if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
        return Err(code);
    }
    let mut names = HashSet::from([asked.to_lowercase()]);
    for _ in 0..ALIASES_MAX {
        let before = names.len();
        for record in &message.answers {
            if let RData::CNAME(alias) = &record.data
                && names.contains(&record.name.to_lowercase())
                && names.len() <= ALIASES_MAX
            {
                names.insert(alias.0.to_lowercase());
            }
        }
        if names.len() == before {
            break;
        }
    }
    let mut texts = Vec::new();
    for record in &message.answers {
        if let RData::TXT(text) = &record.data
            && record.dns_class == DNSClass::IN
            && names.contains(&record.name.to_lowercase())
            && texts.len() < TEXTS_MAX
        {
            let bytes = text.txt_data.concat();
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(TEXT_MAX)]).into_owned();
            texts.push(shown);
        }
    }
    Ok(texts)
}

#[cfg(any(test, fuzzing))]
pub mod fuzzing;
#[cfg(test)]
mod tests;
