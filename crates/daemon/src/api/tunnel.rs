//! TCP to a port inside a sandbox, over a WebSocket.

use std::pin::pin;
use std::sync::Arc;

use axum::extract::State;
use axum::extract::ws::WebSocket;
use axum::response::Response;
use bytes::BytesMut;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use torpor_lifecycle::guest::{GuestError, Sender, Stream};
use torpor_protocol::ErrorCode;
use torpor_protocol::guest::{KEPT_MAX, MAX_PAYLOAD, Reply};
use torpor_proxy::Kept;
use torpor_service::tunnel::{self, CONNECT_DEADLINE};
use torpor_service::{Service, processes};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Awake, Path, Query, RequestId, Upgrade};
use torpor_web::socket::{self, Reader, Received, Writer, upgraded};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(open))
}

#[derive(Debug, Deserialize)]
struct TunnelPath {
    port: u16,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TunnelQuery {
    #[serde(default)]
    keep: bool,
}

/// Connect to a port inside.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/tunnel/{port}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("port" = u16, Path, description = "A TCP port on loopback inside"),
        (
            "keep" = Option<bool>, Query,
            description = "The connection does not keep the sandbox awake: only bytes that go over \
                           it are use. While the sandbox sleeps the connection stays open, and the \
                           client's next byte wakes it. It is closed if the server inside did not \
                           outlive the sleep, and after a day of sleep without a byte.",
        ),
    ),
    responses((
        status = 101,
        description = "A WebSocket: binary messages are the bytes. An empty message says that the \
                       client will send no more. 502 if nothing listens. 503 with `keep` if 256 \
                       connections to this sandbox are kept already.",
    ))
)]
async fn open(
    State(service): State<Arc<Service>>,
    id: RequestId,
    Path(TunnelPath { port }): Path<TunnelPath>,
    Query(TunnelQuery { keep }): Query<TunnelQuery>,
    Awake(awake): Awake,
    Upgrade(upgrade): Upgrade,
) -> Result<Response> {
    if port == 0 {
        return Err(ApiError::invalid("0 is no port"));
    }
    if keep && let Some(kept) = connect_kept(&service, &awake, port).await? {
        return Ok(upgraded(service, id, upgrade, async move |socket, service, _| {
            drop(awake);
            carry_kept(&service, socket, kept).await;
        }));
    }
    let stream = tunnel::connect(&awake, port).await?;
    Ok(upgraded(service, id, upgrade, async move |socket, service, _| {
        carry(&service, socket, stream).await;
        drop(awake);
    }))
}

/// A connection that outlives sleep; none if the agent in that machine is too old for it.
async fn connect_kept(
    service: &Service,
    awake: &processes::Awake,
    port: u16,
) -> Result<Option<Kept>> {
    let full = || {
        let message = format!("the sandbox already has {KEPT_MAX} connections that are kept");
        ApiError::new(ErrorCode::LimitReached, message)
    };
    let keep = awake.sandbox.keep().ok_or_else(full)?;
    let connect = async {
        let mut stream = awake.lease.guest().connect_kept(port, keep.token()).await?;
        let reply = stream.reply().await?;
        if reply != Reply::Done {
            return Err(GuestError::protocol(format!("{reply:?} to a connect")));
        }
        Ok(stream)
    };
    let connected = tokio::time::timeout(CONNECT_DEADLINE, connect).await;
    match connected.map_err(|_| GuestError::Timeout(CONNECT_DEADLINE))? {
        Ok(stream) => Ok(Some(Kept::new(service.fleet.clone(), keep, stream))),
        Err(error) if torpor_proxy::is_too_old(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Until either side is done, or the daemon stops.
async fn carry_kept(service: &Service, socket: WebSocket, kept: Kept) {
    let (mut reader, mut writer) = socket::split(socket);
    let (near, far) = tokio::io::duplex(MAX_PAYLOAD);
    let (mut from_inside, mut to_inside) = tokio::io::split(near);
    let outward = async {
        let mut carried = pin!(kept.carry(far));
        let mut outward = pin!(outward_of(&mut from_inside, &mut writer));
        tokio::select! {
            over = &mut outward => over,
            // What came last is still to be said.
            () = &mut carried => outward.await,
        }
    };
    let over = tokio::select! {
        over = outward => over,
        () = inward_to(&mut reader, &mut to_inside) => Over::Left,
        () = service.stopping.cancelled() => Over::Said,
    };
    if !matches!(over, Over::Left) {
        writer.close(socket::NORMAL, "").await;
        reader.wait_for_close().await;
    }
}

async fn outward_of(from: &mut ReadHalf<DuplexStream>, writer: &mut Writer) -> Over {
    loop {
        let mut bytes = BytesMut::with_capacity(MAX_PAYLOAD);
        let read = tokio::select! {
            read = from.read_buf(&mut bytes) => read,
            _ = writer.keep_alive() => return Over::Left,
        };
        if !read.is_ok_and(|read| read > 0) {
            return Over::Said;
        }
        if writer.feed(bytes.freeze()).await.is_err() || writer.flush().await.is_err() {
            return Over::Left;
        }
    }
}

async fn inward_to(reader: &mut Reader, to: &mut WriteHalf<DuplexStream>) {
    while let Some(received) = reader.recv().await {
        let sent = match received {
            Received::Bytes(bytes) if bytes.is_empty() => to.shutdown().await,
            Received::Bytes(bytes) => to.write_all(&bytes).await,
            Received::Text(_) => return,
        };
        if sent.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Until either side is done, or the daemon stops.
async fn carry(service: &Service, socket: WebSocket, mut stream: Stream) {
    let (mut reader, mut writer) = socket::split(socket);
    let sender = stream.sender();
    let over = tokio::select! {
        over = outward(&mut stream, &mut writer) => over,
        () = inward(&mut reader, &sender) => Over::Left,
        () = service.stopping.cancelled() => Over::Said,
    };
    match over {
        Over::Left => return,
        Over::Said => writer.close(socket::NORMAL, "").await,
        Over::Asleep => {
            writer.close(socket::ERROR, "the sandbox was put to sleep; connect again").await;
        }
    }
    reader.wait_for_close().await;
}

/// Why a tunnel ends.
enum Over {
    /// The client is gone.
    Left,
    /// The server inside said everything.
    Said,
    Asleep,
}

async fn outward(stream: &mut Stream, writer: &mut Writer) -> Over {
    loop {
        let data = tokio::select! {
            data = stream.data() => data,
            _ = writer.keep_alive() => return Over::Left,
        };
        let bytes = match data {
            Ok(Some(bytes)) => bytes,
            Err(GuestError::Asleep) => return Over::Asleep,
            Ok(None) | Err(_) => return Over::Said,
        };
        if writer.feed(bytes).await.is_err() || writer.flush().await.is_err() {
            return Over::Left;
        }
    }
}

async fn inward(reader: &mut Reader, sender: &Sender) {
    while let Some(received) = reader.recv().await {
        let sent = match received {
            Received::Bytes(bytes) if bytes.is_empty() => sender.finish().await,
            Received::Bytes(bytes) => sender.send(&bytes).await,
            Received::Text(_) => return,
        };
        if sent.is_err() {
            return std::future::pending().await;
        }
    }
}
