//! Our name server: on UDP and on TCP, for guests only.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::answer::{By, answer, too_many};
use crate::registry::Guest;
use crate::shared::Shared;

/// Bytes of a question: one name, a few options.
const QUESTION_MAX: usize = 1500;
/// How long a connection waits for the next question.
const IDLE: Duration = Duration::from_secs(10);
/// Pause after the kernel could not give a connection: it has no descriptors, and needs some time.
const PAUSE: Duration = Duration::from_millis(50);

/// Answers questions until `stop`.
pub(crate) fn serve(
    shared: &Arc<Shared>,
    udp: UdpSocket,
    tcp: TcpListener,
    stop: &CancellationToken,
) {
    let packets = packets(Arc::clone(shared), Arc::new(udp), stop.clone());
    tokio::spawn(stop.clone().run_until_cancelled_owned(packets));
    let connections = connections(Arc::clone(shared), tcp, stop.clone());
    tokio::spawn(stop.clone().run_until_cancelled_owned(connections));
}

async fn packets(shared: Arc<Shared>, socket: Arc<UdpSocket>, stop: CancellationToken) {
    let mut buffer = vec![0; QUESTION_MAX];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            sleep(PAUSE).await;
            continue;
        };
        let Some(guest) = guest(&shared, from) else { continue };
        let question = buffer[..length].to_vec();
        let Some(one) = guest.question() else {
            if let Some(bytes) = too_many(&question) {
                // No room to send it: the guest asks again.
                let _ = socket.try_send_to(&bytes, from);
            }
            continue;
        };
        let (shared, socket) = (Arc::clone(&shared), Arc::clone(&socket));
        let gone = guest.gone().clone();
        let answering = async move {
            if let Some(bytes) = answer(&shared, &guest, &question, By::Udp).await {
                // The guest may be gone.
                let _ = socket.send_to(&bytes, from).await;
            }
            drop(one);
        };
        let answering = gone.run_until_cancelled_owned(answering);
        tokio::spawn(stop.clone().run_until_cancelled_owned(answering));
    }
}

async fn connections(shared: Arc<Shared>, listener: TcpListener, stop: CancellationToken) {
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let Some(guest) = guest(&shared, from) else { continue };
        let Some(one) = guest.question() else { continue };
        let (shared, gone) = (Arc::clone(&shared), guest.gone().clone());
        let conversing = async move {
            // However it ends, the connection is closed.
            let _ = converse(&shared, &guest, stream).await;
            drop(one);
        };
        let conversing = gone.run_until_cancelled_owned(conversing);
        tokio::spawn(stop.clone().run_until_cancelled_owned(conversing));
    }
}

/// One question after the other.
async fn converse(shared: &Shared, guest: &Arc<Guest>, mut stream: TcpStream) -> io::Result<()> {
    loop {
        let question = async {
            let length = usize::from(stream.read_u16().await?);
            if length > QUESTION_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut question = vec![0; length];
            stream.read_exact(&mut question).await?;
            Ok::<_, io::Error>(question)
        };
        let question = timeout(IDLE, question).await??;
        let Some(bytes) = answer(shared, guest, &question, By::Tcp).await else { return Ok(()) };
        let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
        let message = [&length.to_be_bytes(), bytes.as_slice()].concat();
        timeout(IDLE, stream.write_all(&message)).await??;
    }
}

fn guest(shared: &Shared, from: SocketAddr) -> Option<Arc<Guest>> {
    match from.ip() {
        IpAddr::V4(address) => shared.registry.find(address),
        IpAddr::V6(_) => None,
    }
}
