//! The handler that the protocol's conformance suite wants to find, with the tools that it names, behind the HTTP
//! settings of the real servers: `conformance 127.0.0.1:PORT`. For `sdk/compat/mcp/run` only.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::any;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ResourceContents, ServerCapabilities,
    ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Map, json};

/// One red pixel, and no sound at all.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEARKwAAIhYAQACABAAZGF0YQAAAAA=";
const STEP: Duration = Duration::from_millis(50);

const TOOLS: [(&str, &str); 7] = [
    ("test_simple_text", "Gives a text"),
    ("test_image_content", "Gives an image"),
    ("test_audio_content", "Gives a sound"),
    ("test_embedded_resource", "Gives a resource"),
    ("test_multiple_content_types", "Gives a text, an image and a resource"),
    ("test_error_handling", "Fails"),
    ("test_tool_with_progress", "Tells how far it is"),
];

#[derive(Clone)]
struct Handler;

fn resource(uri: &str, kind: &str, text: &str) -> ContentBlock {
    ContentBlock::resource(ResourceContents::text(text, uri).with_mime_type(kind))
}

async fn steps(context: &RequestContext<RoleServer>) {
    for done in [0.0, 50.0, 100.0] {
        if let Some(token) = context.meta.get_progress_token() {
            let step = ProgressNotificationParam::new(token, done).with_total(100.0);
            let _ = context.peer.notify_progress(step).await;
        }
        tokio::time::sleep(STEP).await;
    }
}

impl ServerHandler for Handler {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools().into_iter().find(|tool| tool.name == name)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let text = |text: &str| vec![ContentBlock::text(text)];
        let content = match &*request.name {
            "test_simple_text" => text("This is a simple text response for testing."),
            "test_image_content" => vec![ContentBlock::image(PNG, "image/png")],
            "test_audio_content" => vec![ContentBlock::audio(WAV, "audio/wav")],
            "test_embedded_resource" => {
                let said = "This is an embedded resource content.";
                vec![resource("test://embedded-resource", "text/plain", said)]
            }
            "test_multiple_content_types" => {
                let said = r#"{"test":"data","value":123}"#;
                vec![
                    ContentBlock::text("Multiple content types test:"),
                    ContentBlock::image(PNG, "image/png"),
                    resource("test://mixed-content-resource", "application/json", said),
                ]
            }
            "test_error_handling" => {
                let said = text("This tool intentionally returns an error for testing");
                return Ok(CallToolResult::error(said).into());
            }
            "test_tool_with_progress" => {
                steps(&context).await;
                text("done")
            }
            other => return Err(ErrorData::invalid_params(format!("no tool {other}"), None)),
        };
        Ok(CallToolResult::success(content).into())
    }
}

fn tools() -> Vec<Tool> {
    let mut schema = Map::new();
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("properties".to_owned(), json!({}));
    TOOLS.map(|(name, about)| Tool::new(name, about, schema.clone())).to_vec()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let server = torpor_mcp::http::serve(Handler);
    let answer = async move |request: Request| server.handle(request).await.map(Body::new);
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, Router::new().route("/mcp", any(answer))).await
}
