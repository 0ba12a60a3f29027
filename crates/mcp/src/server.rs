//! The handler of the SDK: lists and calls the tools of one server, and answers for its tasks.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, CancelTaskParams,
    ContentBlock, CreateTaskResult, GetTaskParams, GetTaskResult, Implementation, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ProgressToken, ServerCapabilities,
    ServerConfig, Tool as Definition, UpdateTaskParams,
};
use rmcp::service::{Peer, RequestContext};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use tokio::sync::Semaphore;
use torpor_protocol::ErrorCode;
use torpor_service::keys::Caller;
use torpor_service::{Error, Sandbox, Service};
use torpor_web::extract::RequestId;

use crate::answer::{Answer, describe};
use crate::tasks;
use crate::tool::{Call, Toolset};

/// Calls that are under way in the daemon. Each may hold some hundred kilobytes of output.
const CALLS_MAX: usize = 512;
static CALLS: Semaphore = Semaphore::const_new(CALLS_MAX);
const BUSY: &str = "too many calls are under way: call again in a moment";
/// Tools change with the program only.
const LIST_TTL: Duration = Duration::from_secs(5 * 60);

/// The sandbox whose server a request is for.
#[derive(Clone)]
pub(crate) struct OfSandbox(pub(crate) Sandbox);

/// One server, for whoever asks.
#[derive(Clone)]
pub(crate) struct Server {
    service: Arc<Service>,
    tools: &'static Toolset,
}

impl Server {
    pub(crate) fn new(service: &Arc<Service>, tools: &'static Toolset) -> Self {
        Self { service: Arc::clone(service), tools }
    }

    fn call(&self, context: &RequestContext<RoleServer>) -> Result<Call, ErrorData> {
        let nobody = || ErrorData::internal_error("the request did not come over HTTP", None);
        let head = context.extensions.get::<Parts>().ok_or_else(nobody)?;
        let caller = head.extensions.get::<Caller>().ok_or_else(nobody)?;
        let request_id = head.extensions.get::<RequestId>().map(|RequestId(id)| Arc::clone(id));
        let capabilities = context.client_capabilities();
        let token = context.meta.get_progress_token();
        let sandbox = head.extensions.get::<OfSandbox>().map(|OfSandbox(sandbox)| sandbox.clone());
        Ok(Call {
            service: Arc::clone(&self.service),
            caller: *caller,
            above: sandbox.is_none(),
            sandbox,
            cancelled: context.ct.clone(),
            progress: token.map(|token| Progress { peer: context.peer.clone(), token }),
            tasks: capabilities.is_some_and(|capabilities| capabilities.supports_tasks()),
            request_id: request_id.unwrap_or_else(|| "unknown".into()),
        })
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_tasks().build();
        let about = Implementation::new("torpor", env!("CARGO_PKG_VERSION")).with_title("Torpor");
        let mut config = ServerConfig::new(capabilities);
        config.server_info = about;
        config.instructions = Some(self.tools.instructions.to_owned());
        config
    }

    fn get_tool(&self, name: &str) -> Option<Definition> {
        self.tools.definition(name).cloned()
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let ttl_ms = u64::try_from(LIST_TTL.as_millis()).unwrap_or(u64::MAX);
        let list = ListToolsResult::with_all_items(self.tools.definitions());
        Ok(list.with_ttl_ms(ttl_ms).with_cache_scope(CacheScope::Private))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if self.tools.definition(&request.name).is_none() {
            let message = format!("there is no tool {:.80}", request.name);
            return Err(ErrorData::invalid_params(message, None));
        }
        let call = self.call(&context)?;
        let Ok(_permit) = CALLS.try_acquire() else {
            return Ok(failed(BUSY.to_owned()).into());
        };
        let arguments = request.arguments.unwrap_or_default();
        let answer = self.tools.call(&request.name, arguments, call.clone()).await;
        respond(&call, answer).await
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let call = self.call(&context)?;
        let _permit = CALLS.try_acquire().map_err(|_| ErrorData::internal_error(BUSY, None))?;
        tasks::get(&call, &request.task_id).await.map_err(|error| refuse(&call, &error))
    }

    async fn update_task(
        &self,
        request: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let call = self.call(&context)?;
        // No task of ours ever asks for anything.
        let known = tasks::find(&call, &request.task_id).await;
        known.map(drop).map_err(|error| refuse(&call, &error))
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let call = self.call(&context)?;
        let _permit = CALLS.try_acquire().map_err(|_| ErrorData::internal_error(BUSY, None))?;
        tasks::cancel(&call, &request.task_id).await.map_err(|error| refuse(&call, &error))
    }
}

async fn respond(
    call: &Call,
    answer: Result<Answer, Error>,
) -> Result<CallToolResponse, ErrorData> {
    match answer {
        Ok(Answer::Done { text, value }) => {
            let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
            result.structured_content = Some(value);
            Ok(result.into())
        }
        Ok(Answer::Task(id)) => {
            let task = tasks::find(call, &id).await.map_err(|error| refuse(call, &error))?;
            Ok(CreateTaskResult::new(tasks::as_task(&task)).into())
        }
        Err(error) => {
            note(call, &error);
            Ok(failed(describe(&error, &call.request_id)).into())
        }
    }
}

fn failed(text: String) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(text)])
}

/// For requests that are no calls of tools.
fn refuse(call: &Call, error: &Error) -> ErrorData {
    note(call, error);
    let text = describe(error, &call.request_id);
    if error.code() == ErrorCode::Internal {
        return ErrorData::internal_error(text, None);
    }
    ErrorData::invalid_params(text, None)
}

fn note(call: &Call, error: &Error) {
    if error.lost_agent() {
        call.service.metrics.agent_gone();
    }
    if let Some(cause) = error.internal() {
        tracing::error!(id = %call.request_id, error = cause, "a tool failed");
    }
}

/// The way to tell a client how far its call is.
#[derive(Clone)]
pub(crate) struct Progress {
    peer: Peer<RoleServer>,
    token: ProgressToken,
}

impl Progress {
    /// Who does not listen any more is not waited for.
    pub(crate) async fn tell(&self, done: f64, total: f64, message: Option<String>) {
        let mut step = ProgressNotificationParam::new(self.token.clone(), done).with_total(total);
        step.message = message;
        let _ = self.peer.notify_progress(step).await;
    }
}
