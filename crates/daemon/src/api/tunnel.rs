//! TCP to a port inside a sandbox, over a WebSocket.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::extract::ws::WebSocket;
use axum::response::Response;
use serde::Deserialize;
use torpor_lifecycle::guest::{GuestError, Sender, Stream, unexpected};
use torpor_protocol::guest::{Reply, Request};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, Result};
use super::exec::upgraded;
use super::extract::{Awake, Path, RequestId, Upgrade};
use super::socket::{self, Ear, Heard, Mouth};
use crate::app::App;

/// How long a server inside may take to accept.
const CONNECT_DEADLINE: Duration = Duration::from_secs(30);

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(tunnel))
}

#[derive(Debug, Deserialize)]
struct TunnelPath {
    port: u16,
}

/// Connect to a port inside.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/tunnel/{port}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("port" = u16, Path, description = "A TCP port on loopback inside"),
    ),
    responses((
        status = 101,
        description = "A WebSocket: binary messages are the bytes. An empty message says that the \
                       client will send no more. 502 if nothing listens.",
    ))
)]
async fn tunnel(
    State(app): State<Arc<App>>,
    id: RequestId,
    Path(TunnelPath { port }): Path<TunnelPath>,
    awake: Awake,
    Upgrade(upgrade): Upgrade,
) -> Result<Response> {
    if port == 0 {
        return Err(ApiError::invalid("0 is no port"));
    }
    let stream = connect(&awake, port).await?;
    Ok(upgraded(app, id, upgrade, async move |socket, app, _| {
        carry(&app, socket, stream).await;
        drop(awake);
    }))
}

/// A TCP connection to loopback inside.
pub async fn connect(awake: &Awake, port: u16) -> Result<Stream> {
    let request = Request::Connect { port };
    let connect = async {
        let mut stream = awake.lease.guest().open(&request).await?;
        let Reply::Done = stream.reply().await? else { return Err(unexpected(&request)) };
        Ok(stream)
    };
    let connected = tokio::time::timeout(CONNECT_DEADLINE, connect).await;
    Ok(connected.map_err(|_| GuestError::Timeout(CONNECT_DEADLINE))??)
}

/// Until either side is done, or the daemon stops.
pub async fn carry(app: &App, socket: WebSocket, mut stream: Stream) {
    let (mut ear, mut mouth) = socket::split(socket);
    let sender = stream.sender();
    let over = tokio::select! {
        over = outward(&mut stream, &mut mouth) => over,
        () = inward(&mut ear, &sender) => Over::Left,
        () = app.stopping.cancelled() => Over::Said,
    };
    match over {
        Over::Left => return,
        Over::Said => mouth.close(socket::NORMAL, "").await,
        Over::Asleep => {
            mouth.close(socket::ERROR, "the sandbox was put to sleep; connect again").await;
        }
    }
    ear.wait_for_close().await;
}

/// Why a tunnel ends.
enum Over {
    /// The client is gone.
    Left,
    /// The server inside said everything.
    Said,
    Asleep,
}

async fn outward(stream: &mut Stream, mouth: &mut Mouth) -> Over {
    loop {
        let data = tokio::select! {
            data = stream.data() => data,
            _ = mouth.keep_alive() => return Over::Left,
        };
        let bytes = match data {
            Ok(Some(bytes)) => bytes,
            Err(GuestError::Asleep) => return Over::Asleep,
            Ok(None) | Err(_) => return Over::Said,
        };
        if mouth.feed(bytes).await.is_err() || mouth.flush().await.is_err() {
            return Over::Left;
        }
    }
}

async fn inward(ear: &mut Ear, sender: &Sender) {
    while let Some(heard) = ear.hear().await {
        let sent = match heard {
            Heard::Bytes(bytes) if bytes.is_empty() => sender.finish().await,
            Heard::Bytes(bytes) => sender.send(&bytes).await,
            Heard::Text(_) => return,
        };
        if sent.is_err() {
            return std::future::pending().await;
        }
    }
}
