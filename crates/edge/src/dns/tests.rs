//! Name servers that answer, lie, flood and say nothing.

use std::sync::Arc;

use hickory_proto::rr::Record;
use hickory_proto::rr::rdata::{CNAME, TXT};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::*;

const NAME: &str = "_torpor.app.example.org";

fn name(text: &str) -> Name {
    let mut name = Name::from_ascii(text).unwrap();
    name.set_fqdn(true);
    name
}

fn text(owner: &str, parts: &[&str]) -> Record {
    let parts = parts.iter().map(|part| (*part).to_owned()).collect();
    Record::from_rdata(name(owner), 60, RData::TXT(TXT::new(parts)))
}

fn alias(owner: &str, target: &str) -> Record {
    Record::from_rdata(name(owner), 60, RData::CNAME(CNAME(name(target))))
}

/// The answer to a question, as a well-behaved server gives it.
fn answer(question: &Message, records: Vec<Record>) -> Message {
    let mut answer = Message::response(question.metadata.id, OpCode::Query);
    answer.queries = question.queries.clone();
    answer.answers = records;
    answer
}

/// A name server on one port for datagrams and streams, that says what `say` says: any number of
/// datagrams to each question, and one message on each stream.
struct Server {
    address: SocketAddr,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl Server {
    async fn start(
        datagrams: impl Fn(&Message) -> Vec<Vec<u8>> + Send + Sync + 'static,
        stream: impl Fn(&Message) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        let (socket, listener) = loop {
            let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            // The port may be somebody's for streams.
            if let Ok(listener) = TcpListener::bind(socket.local_addr().unwrap()).await {
                break (socket, listener);
            }
        };
        let address = socket.local_addr().unwrap();
        let by_datagram = tokio::spawn(async move {
            let mut buffer = [0; 2000];
            loop {
                let (read, peer) = socket.recv_from(&mut buffer).await.unwrap();
                for bytes in datagrams(&Message::from_vec(&buffer[..read]).unwrap()) {
                    socket.send_to(&bytes, peer).await.unwrap();
                }
            }
        });
        let by_stream = tokio::spawn(async move {
            loop {
                let (mut peer, _) = listener.accept().await.unwrap();
                let mut question = vec![0; usize::from(peer.read_u16().await.unwrap())];
                peer.read_exact(&mut question).await.unwrap();
                peer.write_all(&stream(&Message::from_vec(&question).unwrap())).await.unwrap();
            }
        });
        let _tasks = [by_datagram, by_stream].map(AbortOnDropHandle::new);
        Self { address, _tasks }
    }

    async fn says(records: Vec<Record>) -> Self {
        let datagram =
            move |question: &Message| vec![answer(question, records.clone()).to_vec().unwrap()];
        Self::start(datagram, |_| Vec::new()).await
    }

    async fn ask(&self) -> Result<Vec<String>, DnsError> {
        Resolver::Server(self.address).ask(NAME).await
    }
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    [&u16::try_from(bytes.len()).unwrap().to_be_bytes(), bytes].concat()
}

#[tokio::test]
async fn all_texts_of_the_name_are_found_and_their_parts_put_together() {
    let records =
        vec![text(NAME, &["torpor-", "verify=x"]), text("_TORPOR.App.example.org", &["y"])];
    let server = Server::says(records).await;
    assert_eq!(server.ask().await.unwrap(), ["torpor-verify=x", "y"]);
}

#[tokio::test]
async fn texts_of_other_names_count_for_nothing() {
    let records = vec![
        text("_torpor.evil.example.org", &["torpor-verify=x"]),
        alias("elsewhere.example.org", "target.example.org"),
        text("target.example.org", &["torpor-verify=x"]),
    ];
    let server = Server::says(records).await;
    assert_eq!(server.ask().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn aliases_are_followed_and_circles_end() {
    let records = vec![
        text("end.example.net", &["found"]),
        alias("middle.example.net", "end.example.net"),
        alias(NAME, "middle.example.net"),
        alias("end.example.net", NAME),
    ];
    let server = Server::says(records).await;
    assert_eq!(server.ask().await.unwrap(), ["found"]);
}

#[tokio::test]
async fn an_answer_to_another_question_is_ignored_and_the_right_one_awaited() {
    let datagrams = |question: &Message| {
        let lie = vec![text(NAME, &["lie"])];
        let mut stranger = answer(question, lie.clone());
        stranger.metadata.id = question.metadata.id.wrapping_add(1);
        let mut other = answer(question, lie.clone());
        other.queries = vec![Query::query(name("other.example.org"), RecordType::TXT)];
        let mut echo = question.clone();
        echo.answers = lie;
        let truth = answer(question, vec![text(NAME, &["truth"])]);
        let mut all = vec![vec![0xff; 40], Vec::new()];
        all.extend([stranger, other, echo, truth].map(|message| message.to_vec().unwrap()));
        all
    };
    let server = Server::start(datagrams, |_| Vec::new()).await;
    assert_eq!(server.ask().await.unwrap(), ["truth"]);
}

#[tokio::test]
async fn a_long_answer_is_asked_for_again_over_a_stream() {
    let cut = |question: &Message| {
        let mut cut = answer(question, vec![text(NAME, &["half"])]);
        cut.metadata.truncation = true;
        vec![cut.to_vec().unwrap()]
    };
    let whole = |question: &Message| {
        let many = (0..300).map(|number| text(NAME, &[&format!("{number}-{}", "x".repeat(150))]));
        framed(&answer(question, many.collect()).to_vec().unwrap())
    };
    let server = Server::start(cut, whole).await;
    let texts = server.ask().await.unwrap();
    assert_eq!(texts.len(), TEXTS_MAX);
    assert!(texts[0].starts_with("0-"), "{}", texts[0]);
}

#[tokio::test]
async fn a_stream_that_lies_about_the_question_is_an_error() {
    let cut = |question: &Message| {
        let mut cut = answer(question, Vec::new());
        cut.metadata.truncation = true;
        vec![cut.to_vec().unwrap()]
    };
    let lie = |question: &Message| {
        let mut lie = answer(question, vec![text(NAME, &["lie"])]);
        lie.metadata.id = question.metadata.id.wrapping_add(1);
        framed(&lie.to_vec().unwrap())
    };
    let server = Server::start(cut, lie).await;
    assert!(matches!(server.ask().await, Err(DnsError::Garbled(_))));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_named_in_the_end() {
    let server = Server::start(|_| Vec::new(), |_| Vec::new()).await;
    let error = server.ask().await.unwrap_err().to_string();
    assert!(error.contains(&server.address.to_string()) && error.contains(NAME), "{error}");
}

#[tokio::test]
async fn a_name_that_is_not_there_has_no_texts_and_a_refusal_is_an_error() {
    for (code, fine) in [(ResponseCode::NXDomain, true), (ResponseCode::ServFail, false)] {
        let datagram = move |question: &Message| {
            let mut answer = answer(question, Vec::new());
            answer.metadata.response_code = code;
            vec![answer.to_vec().unwrap()]
        };
        let server = Server::start(datagram, |_| Vec::new()).await;
        assert_eq!(server.ask().await.is_ok(), fine, "{code}");
    }
}

#[tokio::test]
async fn the_servers_of_the_host_are_read_within_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let path: Arc<Path> = dir.path().join("resolv.conf").into();
    let text = "# nameserver 9.9.9.9\nsearch x\nnameserver 127.0.0.9\nnameserver nonsense\n\
                nameserver ::1\nnameserver 1.1.1.1\nnameserver 2.2.2.2\n";
    std::fs::write(&path, text).unwrap();
    let found: Vec<_> = servers(&path).await.iter().map(ToString::to_string).collect();
    assert_eq!(found, ["127.0.0.9:53", "[::1]:53", "1.1.1.1:53"]);
    let nowhere = dir.path().join("nowhere");
    let error = Resolver::Host(nowhere).ask(NAME).await.unwrap_err();
    assert!(matches!(error, DnsError::NoServer(_)), "{error}");
}
