//! The MCP gateway: upstream servers, what of them is approved, what keys may call, what was called.

use std::collections::HashSet;
use std::sync::Arc;

use axum::Extension;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::RecvError;
use torpor_gateway::{CallFeed, Gateway};
use torpor_protocol::mcp_gateway::{
    AddMcpServer, DecideMcpItems, McpCall, McpCallList, McpClient, McpClientList, McpClientPolicy,
    McpDiff, McpServer, McpServerList, McpTokens,
};
use torpor_protocol::{ErrorCode, Name};
use torpor_service::Service;
use torpor_service::keys::Caller;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Path, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ndjson::ndjson;
use super::page::{Cut, PageQuery};
use super::{Answer, no_content, with_status};

type Shared = Extension<Arc<Gateway>>;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(add, list))
        .routes(routes!(get, delete))
        .routes(routes!(refresh))
        .routes(routes!(diff))
        .routes(routes!(approve))
        .routes(routes!(reject))
        .routes(routes!(clients))
        .routes(routes!(client, set_client, delete_client))
        .routes(routes!(tokens))
        .routes(routes!(calls))
}

// === Servers ===

#[derive(Debug, Deserialize)]
struct ServerPath {
    server: Name,
}

/// Add an upstream server of the MCP gateway. What it shows is held back until it is approved.
#[utoipa::path(
    post, path = "/v1/mcp/gateway/servers", request_body = AddMcpServer,
    responses((status = 201, description = "It is there, and was asked what it shows.", body = McpServer))
)]
async fn add(Extension(gateway): Shared, Json(request): Json<AddMcpServer>) -> Result<Response> {
    Ok(with_status(StatusCode::CREATED, gateway.add(request).await?))
}

/// List the upstream servers of the MCP gateway.
#[utoipa::path(
    get, path = "/v1/mcp/gateway/servers", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = McpServerList))
)]
async fn list(Extension(gateway): Shared, Query(query): Query<PageQuery>) -> Answer<McpServerList> {
    Ok(Json(Cut::try_from(query)?.of(gateway.servers(), |server| server.name.to_string())))
}

/// Get an upstream server of the MCP gateway.
#[utoipa::path(
    get, path = "/v1/mcp/gateway/servers/{server}",
    params(("server" = String, Path, description = "Name")),
    responses((status = 200, description = "The server.", body = McpServer))
)]
async fn get(Extension(gateway): Shared, Path(path): Path<ServerPath>) -> Answer<McpServer> {
    Ok(Json(gateway.show(&path.server)?))
}

/// Remove an upstream server of the MCP gateway, with its sandbox and what was approved of it.
#[utoipa::path(
    delete, path = "/v1/mcp/gateway/servers/{server}",
    params(("server" = String, Path, description = "Name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(Extension(gateway): Shared, Path(path): Path<ServerPath>) -> Result<Response> {
    gateway.remove(&path.server).await?;
    Ok(no_content())
}

/// Ask an upstream server again what it shows.
#[utoipa::path(
    post, path = "/v1/mcp/gateway/servers/{server}/refresh",
    params(("server" = String, Path, description = "Name")),
    responses((
        status = 200, description = "As it is now; `problem` says why it could not be asked.", body = McpServer,
    ))
)]
async fn refresh(Extension(gateway): Shared, Path(path): Path<ServerPath>) -> Answer<McpServer> {
    Ok(Json(gateway.refresh(&path.server).await?))
}

/// Get what an upstream server shows against what is approved.
#[utoipa::path(
    get, path = "/v1/mcp/gateway/servers/{server}/diff",
    params(("server" = String, Path, description = "Name")),
    responses((status = 200, description = "What differs.", body = McpDiff))
)]
async fn diff(Extension(gateway): Shared, Path(path): Path<ServerPath>) -> Answer<McpDiff> {
    Ok(Json(gateway.diff(&path.server)?))
}

/// Approve what differs, as it was looked at. From then on clients see it.
#[utoipa::path(
    post, path = "/v1/mcp/gateway/servers/{server}/approve",
    params(("server" = String, Path, description = "Name")), request_body = DecideMcpItems,
    responses((status = 200, description = "The server as it is now.", body = McpServer))
)]
async fn approve(
    Extension(gateway): Shared,
    Path(path): Path<ServerPath>,
    Json(wanted): Json<DecideMcpItems>,
) -> Answer<McpServer> {
    Ok(Json(gateway.approve(&path.server, &wanted).await?))
}

/// Reject what differs, as it was looked at. What was approved under these names is taken back.
#[utoipa::path(
    post, path = "/v1/mcp/gateway/servers/{server}/reject",
    params(("server" = String, Path, description = "Name")), request_body = DecideMcpItems,
    responses((status = 200, description = "The server as it is now.", body = McpServer))
)]
async fn reject(
    Extension(gateway): Shared,
    Path(path): Path<ServerPath>,
    Json(wanted): Json<DecideMcpItems>,
) -> Answer<McpServer> {
    Ok(Json(gateway.reject(&path.server, &wanted).await?))
}

// === Keys ===

#[derive(Debug, Deserialize)]
struct KeyPath {
    key: String,
}

/// List the keys that have a policy for the MCP gateway.
#[utoipa::path(
    get, path = "/v1/mcp/gateway/clients", params(PageQuery),
    responses((status = 200, description = "Sorted by key.", body = McpClientList))
)]
async fn clients(
    Extension(gateway): Shared,
    Query(query): Query<PageQuery>,
) -> Answer<McpClientList> {
    Ok(Json(Cut::try_from(query)?.of(gateway.clients(), |client| client.key.clone())))
}

/// Get what a key may call through the MCP gateway.
#[utoipa::path(
    get, path = "/v1/mcp/gateway/clients/{key}",
    params(("key" = String, Path, description = "Id of the key, or `root`")),
    responses((status = 200, description = "Its policy.", body = McpClient))
)]
async fn client(Extension(gateway): Shared, Path(path): Path<KeyPath>) -> Answer<McpClient> {
    Ok(Json(gateway.show_client(&path.key)?))
}

/// Say what a key may call through the MCP gateway. From then on it opens the gateway and nothing else.
#[utoipa::path(
    put, path = "/v1/mcp/gateway/clients/{key}",
    params(("key" = String, Path, description = "Id of the key, or `root`")), request_body = McpClientPolicy,
    responses((status = 200, description = "From now on this is its policy.", body = McpClient))
)]
async fn set_client(
    Extension(gateway): Shared,
    Extension(caller): Extension<Caller>,
    Path(path): Path<KeyPath>,
    Json(policy): Json<McpClientPolicy>,
) -> Answer<McpClient> {
    Ok(Json(gateway.set_client(&caller, &path.key, policy).await?))
}

/// Remove the policy of a key: it opens the whole API again, and may call what the configuration says for keys
/// without one.
#[utoipa::path(
    delete, path = "/v1/mcp/gateway/clients/{key}",
    params(("key" = String, Path, description = "Id of the key, or `root`")),
    responses((status = 204, description = "It has none any more."))
)]
async fn delete_client(Extension(gateway): Shared, Path(path): Path<KeyPath>) -> Result<Response> {
    gateway.remove_client(&path.key).await?;
    Ok(no_content())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TokensQuery {
    /// Id of the key; default: `root`.
    key: Option<String>,
}

/// Get what the list of tools of a key costs a model, in tokens.
#[utoipa::path(
    get, path = "/v1/mcp/gateway/tokens", params(TokensQuery),
    responses((status = 200, description = "Estimates, with all tools and in search mode.", body = McpTokens))
)]
async fn tokens(Extension(gateway): Shared, Query(query): Query<TokensQuery>) -> Answer<McpTokens> {
    let key = query.key.unwrap_or_else(|| torpor_gateway::ROOT.to_owned());
    Ok(Json(gateway.tokens(&key)))
}

// === Calls ===

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CallsQuery {
    /// The newest so many, 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Go on with what happens from now on: one McpCall a line (NDJSON), oldest first.
    #[serde(default)]
    follow: bool,
}

/// A line of those who follow.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Line {
    Call(Box<McpCall>),
    /// So many were too fast for who follows.
    Missed {
        missed: u64,
    },
}

/// Get what was called through the MCP gateway.
#[utoipa::path(
    get, path = "/v1/mcp/gateway/calls", params(CallsQuery),
    responses((
        status = 200, description = "Newest first. With `follow`, until the daemon stops.",
        content((McpCallList = "application/json"), (McpCall = "application/x-ndjson")),
    ))
)]
async fn calls(
    axum::extract::State(service): axum::extract::State<Arc<Service>>,
    Extension(gateway): Shared,
    Query(query): Query<CallsQuery>,
) -> Result<Response> {
    let cut = Cut::new(query.limit, query.cursor)?;
    if !query.follow {
        let calls = gateway.calls(cut.parsed()?, cut.rows()).await?;
        let page: McpCallList = cut.page(calls, |call: &McpCall| call.id.to_string());
        return Ok(Json(page).into_response());
    }
    if cut.cursor.is_some() {
        return Err(ApiError::new(ErrorCode::InvalidRequest, "follow has no cursor"));
    }
    // Before what was is read, so that nothing falls in between; what is in both is told once.
    let feed = gateway.follow_calls();
    let mut before = gateway.calls(None, cut.limit).await?;
    before.reverse();
    let known: HashSet<_> = before.iter().map(told_as).collect();
    let told =
        futures_util::stream::iter(before.into_iter().map(|call| Line::Call(Box::new(call))));
    let news = futures_util::stream::unfold((feed, known), async |(mut feed, mut known)| {
        let line = next(&mut feed, &mut known).await?;
        Some((line, (feed, known)))
    });
    let stopping = service.stopping.clone();
    Ok(ndjson(told.chain(news.take_until(async move { stopping.cancelled().await }))))
}

/// What tells calls apart that have no id yet.
type Told = (u64, String, u64);

fn told_as(call: &McpCall) -> Told {
    (call.at_ms, call.arguments_hash.clone(), call.took_us)
}

async fn next(feed: &mut CallFeed, known: &mut HashSet<Told>) -> Option<Line> {
    loop {
        match feed.recv().await {
            Ok(call) if known.remove(&told_as(&call)) => {}
            Ok(call) => return Some(Line::Call(Box::new((*call).clone()))),
            Err(RecvError::Lagged(missed)) => return Some(Line::Missed { missed }),
            Err(RecvError::Closed) => return None,
        }
    }
}
