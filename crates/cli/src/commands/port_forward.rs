//! `torpor port-forward`
//!
//! Each connection to the local port is a WebSocket to the daemon: binary messages are the bytes, an
//! empty one is the end of what the local side sends, a close is the end of the other's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use clap::Args;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::MissedTickBehavior;
use tokio_tungstenite::tungstenite::Message;
use torpor_client::{Client, Route, Socket};
use torpor_protocol::{SandboxRef, Status};

use crate::error::{Error, Result};
use crate::output;

/// Connections at once; more wait to be accepted.
const CONNECTIONS: usize = 1024;
const CHUNK: usize = 64 * 1024;
/// Tells the daemon that we are there while a connection is quiet.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
/// A pause after an accept that failed, for want of descriptors most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Forward a local port to a port of a sandbox, until ctrl-c.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor port-forward web 8080          \
    here 8080 is 8080 inside\n  torpor port-forward web 9000:80 5432  several at once")]
pub(super) struct PortForward {
    /// Name or id.
    sandbox: SandboxRef,
    /// Port here and port inside; 0 here takes a free one.
    #[arg(required = true, value_name = "LOCAL[:REMOTE]")]
    ports: Vec<Ports>,
    /// Address to listen on.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
    /// Let the sandbox sleep while connections are open and quiet. They stay open, and the next byte
    /// of the local side wakes it.
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    local: u16,
    remote: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |_| "ports are such as 8080 or 9000:80".to_owned();
        let (local, remote) = text.split_once(':').unwrap_or((text, text));
        let ports =
            Self { local: local.parse().map_err(bad)?, remote: remote.parse().map_err(bad)? };
        if ports.remote == 0 {
            return Err("the port inside can't be 0".to_owned());
        }
        Ok(ports)
    }
}

impl PortForward {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        // An unknown sandbox is better said now than at the first connection.
        let _: Status = client.get(&Route::sandbox(&self.sandbox)).await?;
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let mut listeners = Vec::new();
        for ports in &self.ports {
            let address = SocketAddr::new(self.address, ports.local);
            let failed = |error| Error::local(format!("listen on {address}"), error);
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            let bound = listener.local_addr().map_err(failed)?;
            output::line(&format!("{bound} -> {}:{}", self.sandbox, ports.remote))?;
            let port = ports.remote.to_string();
            let mut route = Route::sandbox(&self.sandbox).then("/tunnel").part(&port);
            if self.keep {
                route = route.query("keep", "true");
            }
            listeners.push(accept(listener, client.clone(), route, Arc::clone(&room)));
        }
        tokio::select! {
            _ = futures_util::future::join_all(listeners) => Ok(ExitCode::SUCCESS),
            _ = tokio::signal::ctrl_c() => Ok(ExitCode::SUCCESS),
        }
    }
}

async fn accept(listener: TcpListener, client: Client, route: Route, room: Arc<Semaphore>) {
    loop {
        let place = Arc::clone(&room).acquire_owned().await.expect("it is never closed");
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                output::note(&format!("torpor: can't accept a connection: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (client, route) = (client.clone(), route.clone());
        tokio::spawn(async move {
            if let Err(error) = forward(stream, &client, &route).await {
                output::note(&format!("{peer}: {}", error.render(false).trim_end()));
            }
            drop(place);
        });
    }
}

async fn forward(stream: TcpStream, client: &Client, route: &Route) -> Result<()> {
    let _ = stream.set_nodelay(true);
    let socket = client.socket(route).await?;
    let (sink, source) = socket.split();
    let (read, write) = stream.into_split();
    let inward = tokio::spawn(inward(read, sink));
    outward(source, write).await;
    // The other side said all it will; what we still had to say interests nobody.
    inward.abort();
    Ok(())
}

async fn inward(mut from: OwnedReadHalf, mut to: SplitSink<Socket, Message>) {
    let mut alive = tokio::time::interval(ALIVE_EVERY);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut open = true;
    loop {
        let mut chunk = BytesMut::with_capacity(CHUNK);
        let message = tokio::select! {
            read = from.read_buf(&mut chunk), if open => {
                // A broken connection is over too; an empty message says so.
                open = read.is_ok_and(|read| read > 0);
                Message::binary(chunk.freeze())
            }
            _ = alive.tick() => Message::Pong(Bytes::new()),
        };
        if to.send(message).await.is_err() {
            return;
        }
    }
}

async fn outward(mut from: SplitStream<Socket>, mut to: OwnedWriteHalf) {
    while let Some(Ok(message)) = from.next().await {
        match message {
            Message::Binary(bytes) => {
                if to.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            Message::Close(_) => break,
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => (),
        }
    }
    let _ = to.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_two_numbers() {
        let parse = |text: &str| text.parse::<Ports>();
        assert_eq!(parse("8080"), Ok(Ports { local: 8080, remote: 8080 }));
        assert_eq!(parse("0:80"), Ok(Ports { local: 0, remote: 80 }));
        for text in ["", ":", "80:", ":80", "a", "70000", "80:0", "0", "1:2:3", "-1"] {
            assert!(parse(text).is_err(), "{text:?} was accepted");
        }
    }
}
