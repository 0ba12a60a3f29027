//! TCP connections to servers inside the machine.
//!
//! Both directions end on their own, as TCP's do.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;
use torpor_protocol::guest::{Failure, FailureCode, Kind, Reply};

use crate::failure::failure;
use crate::stream::Stream;

/// Loopback answers at once, unless the server's queue is full.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

pub(crate) async fn connect(stream: &Stream, port: u16) -> Result<(), Failure> {
    let connection = dial(port).await.map_err(|error| {
        let message = format!("nothing listens on port {port}: {}", crate::failure::reason(&error));
        failure(FailureCode::NotListening, message)
    })?;
    // Small messages go at once: latency matters more than packets on loopback.
    let _ = connection.set_nodelay(true);
    stream.reply(&Reply::Done).await;
    let (incoming, outgoing) = connection.into_split();
    let both = async { tokio::try_join!(bring(stream, incoming), carry(stream, outgoing)) };
    if both.await.is_err() {
        stream.abort().await;
    }
    Ok(())
}

async fn dial(port: u16) -> io::Result<TcpStream> {
    let dial = async {
        match TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await {
            Ok(connection) => Ok(connection),
            Err(error) => TcpStream::connect(SocketAddr::from((Ipv6Addr::LOCALHOST, port)))
                .await
                .map_err(|_| error),
        }
    };
    timeout(CONNECT_DEADLINE, dial).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// From the server to the daemon.
async fn bring(stream: &Stream, incoming: OwnedReadHalf) -> io::Result<()> {
    loop {
        incoming.readable().await?;
        let mut ended = false;
        stream
            .send_data(|room| match incoming.try_read(room) {
                Ok(0) => {
                    ended = true;
                    Ok(None)
                }
                Ok(length) => Ok(Some((Kind::Data, length))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(error) => Err(error),
            })
            .await?;
        if ended {
            stream.end().await;
            return Ok(());
        }
    }
}

/// From the daemon to the server.
async fn carry(stream: &Stream, mut outgoing: OwnedWriteHalf) -> io::Result<()> {
    while let Some(bytes) = stream.receive().await {
        outgoing.write_all(&bytes).await?;
    }
    outgoing.shutdown().await
}
