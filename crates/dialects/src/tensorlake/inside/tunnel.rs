//! TCP to a port inside, over a WebSocket: the bytes are binary frames, and either side ends with a
//! close. What a client sent before its close arrives.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::extract::ws::{WebSocket, close_code};
use axum::response::Response;
use axum::routing::get;
use serde::Deserialize;
use tokio::time::timeout;
use torpor_service::error::GuestError;
use torpor_service::{Sender, Service, Stream, tunnel};
use torpor_web::extract::{Query, RequestId, Upgrade};
use torpor_web::socket::{self, Reader, Received, Writer, upgraded};

use super::{Refused, Result};
use crate::tensorlake::gate::Inside;

/// How long a server inside may take to read the last of a client that has closed.
const LAST_BYTES: Duration = Duration::from_secs(10);

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new().route("/tunnels/tcp", get(open))
}

#[derive(Debug, Deserialize)]
struct PortQuery {
    port: u16,
}

async fn open(
    State(service): State<Arc<Service>>,
    id: RequestId,
    Query(PortQuery { port }): Query<PortQuery>,
    Inside(awake): Inside,
    Upgrade(upgrade): Upgrade,
) -> Result<Response> {
    if port == 0 {
        return Err(Refused::invalid("port: 0 is no port"));
    }
    let stream = tunnel::connect(&awake, port).await?;
    Ok(upgraded(service, id, upgrade, async move |socket, service, _| {
        carry(&service, socket, stream).await;
        drop(awake);
    }))
}

/// Why a tunnel ends.
enum Over {
    /// The client is gone, or has closed.
    Left,
    /// What the client is told.
    Close(u16, &'static str),
}

async fn carry(service: &Service, socket: WebSocket, mut stream: Stream) {
    let (mut reader, mut writer) = socket::split(socket);
    let sender = stream.sender();
    let over = tokio::select! {
        over = outward(&mut stream, &mut writer) => over,
        over = inward(&mut reader, &sender) => over,
        () = service.stopping.cancelled() => Over::Close(close_code::AWAY, "the daemon stops"),
    };
    match over {
        Over::Left => {
            let last = async {
                let _ = sender.finish().await;
                // Nobody reads what comes now, but the server may have to send it to read on.
                while let Ok(Some(_)) = stream.data().await {}
            };
            let _ = timeout(LAST_BYTES, last).await;
        }
        Over::Close(code, reason) => {
            writer.close(code, reason).await;
            reader.wait_for_close().await;
        }
    }
}

async fn outward(stream: &mut Stream, writer: &mut Writer) -> Over {
    loop {
        let data = tokio::select! {
            data = stream.data() => data,
            _ = writer.keep_alive() => return Over::Left,
        };
        let bytes = match data {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Over::Close(close_code::NORMAL, ""),
            Err(GuestError::Asleep) => {
                return Over::Close(
                    close_code::AWAY,
                    "the sandbox was put to sleep; connect again",
                );
            }
            Err(_) => return Over::Close(close_code::ERROR, "the connection inside broke"),
        };
        if writer.feed(bytes).await.is_err() || writer.flush().await.is_err() {
            return Over::Left;
        }
    }
}

async fn inward(reader: &mut Reader, sender: &Sender) -> Over {
    while let Some(received) = reader.recv().await {
        let bytes = match received {
            Received::Bytes(bytes) => bytes,
            Received::Text(_) => {
                return Over::Close(close_code::PROTOCOL, "bytes are binary frames");
            }
        };
        if sender.send(&bytes).await.is_err() {
            // The other direction knows why.
            return std::future::pending().await;
        }
    }
    Over::Left
}
