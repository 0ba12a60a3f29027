//! A tool: what it is called, what it takes and gives, what it may do, and the call of one.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rmcp::handler::server::common::{schema_for_input, schema_for_output};
use rmcp::model::{JsonObject, Tool as Definition, ToolAnnotations};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use torpor_protocol::SandboxRef;
use torpor_service::keys::Caller;
use torpor_service::processes::Awake;
use torpor_service::{Error, Result, Sandbox, Service};

use crate::answer::Answer;
use crate::server::Progress;

/// What a tool may do, as clients show it to people before they allow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing changes.
    Reads,
    /// Something is added, each time.
    Adds,
    /// Calling it again changes nothing more, and nothing is lost.
    Settles,
    /// What was there may be lost.
    Destroys,
    /// The same, but calling it again changes nothing more.
    DestroysOnce,
    /// Whatever a program does, also to others.
    Anything,
}

impl Effect {
    fn annotations(self) -> ToolAnnotations {
        let (reads, destroys, once) = match self {
            Self::Reads => (true, false, true),
            Self::Adds => (false, false, false),
            Self::Settles => (false, false, true),
            Self::Destroys | Self::Anything => (false, true, false),
            Self::DestroysOnce => (false, true, true),
        };
        let open = self == Self::Anything;
        ToolAnnotations::new()
            .read_only(reads)
            .destructive(destroys)
            .idempotent(once)
            .open_world(open)
    }
}

/// Arguments that know what to do: the type is what a client may send.
pub(crate) trait Tool: DeserializeOwned + JsonSchema + Send + 'static {
    const NAME: &'static str;
    const TITLE: &'static str;
    const ABOUT: &'static str;
    const EFFECT: Effect;
    type Output: Serialize + JsonSchema + 'static;

    fn call(self, call: &Call) -> impl Future<Output = Result<Answer>> + Send;
}

/// Who calls, and from where.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) service: Arc<Service>,
    pub(crate) caller: Caller,
    /// Whose server was asked; of the server above all sandboxes none.
    pub(crate) sandbox: Option<Sandbox>,
    /// The server above all sandboxes was asked.
    pub(crate) above: bool,
    /// Nobody waits for the answer any more.
    pub(crate) cancelled: CancellationToken,
    pub(crate) progress: Option<Progress>,
    /// Whether the client knows what a task is.
    pub(crate) tasks: bool,
    pub(crate) request_id: Arc<str>,
}

impl Call {
    pub(crate) fn sandbox(&self) -> Result<&Sandbox> {
        self.sandbox.as_ref().ok_or_else(|| Error::invalid("no sandbox is named"))
    }

    /// The same call in a sandbox that its arguments name.
    pub(crate) fn within(&self, name: &str) -> Result<Self> {
        let of: SandboxRef =
            name.parse().map_err(|error| Error::invalid(format!("sandbox: {error}")))?;
        Ok(Self { sandbox: Some(self.service.fleet.find(&of)?), ..self.clone() })
    }

    /// Wakes the sandbox if need be.
    pub(crate) async fn awake(&self) -> Result<Awake> {
        Awake::new(&self.service, self.sandbox()?.clone()).await
    }
}

type Run = fn(Value, Call) -> BoxFuture<'static, Result<Answer>>;

struct Entry {
    definition: Definition,
    effect: Effect,
    run: Run,
}

/// The tools of a server, in the order in which they are listed.
pub(crate) struct Toolset {
    pub(crate) instructions: &'static str,
    entries: Vec<Entry>,
    by_name: BTreeMap<&'static str, usize>,
}

impl Toolset {
    pub(crate) fn new(instructions: &'static str) -> Self {
        Self { instructions, entries: Vec::new(), by_name: BTreeMap::new() }
    }

    pub(crate) fn with<T: Tool>(mut self) -> Self {
        let input = schema_for_input::<T>().unwrap_or_default();
        let definition = Definition::new(T::NAME, T::ABOUT, input)
            .with_title(T::TITLE)
            .with_raw_output_schema(schema_for_output::<T::Output>())
            .with_annotations(T::EFFECT.annotations());
        self.by_name.insert(T::NAME, self.entries.len());
        self.entries.push(Entry { definition, effect: T::EFFECT, run: run::<T> });
        self
    }

    pub(crate) fn definitions(&self) -> Vec<Definition> {
        self.entries.iter().map(|entry| entry.definition.clone()).collect()
    }

    pub(crate) fn definition(&self, name: &str) -> Option<&Definition> {
        self.entry(name).map(|entry| &entry.definition)
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|at| &self.entries[*at])
    }

    /// Calls a tool. One that only looks is asked again if somebody put the sandbox to sleep meanwhile.
    pub(crate) async fn call(
        &self,
        name: &str,
        arguments: JsonObject,
        call: Call,
    ) -> Result<Answer> {
        let Some(entry) = self.entry(name) else {
            return Err(Error::invalid(format!("there is no tool {name:.80}")));
        };
        refuse_unknown(&entry.definition.input_schema, &arguments)?;
        let arguments = Value::Object(arguments);
        let answer = (entry.run)(arguments.clone(), call.clone()).await;
        match answer {
            Err(error) if error.cut_by_sleep() && entry.effect == Effect::Reads => {
                (entry.run)(arguments, call).await
            }
            answer => answer,
        }
    }
}

fn run<T: Tool>(arguments: Value, call: Call) -> BoxFuture<'static, Result<Answer>> {
    async move {
        let tool: T = serde_json::from_value(arguments)
            .map_err(|error| Error::invalid(format!("arguments of {}: {error}", T::NAME)))?;
        tool.call(&call).await
    }
    .boxed()
}

/// An argument that nobody reads is a mistake of whoever sent it.
fn refuse_unknown(schema: &JsonObject, arguments: &JsonObject) -> Result<()> {
    let known = schema.get("properties").and_then(Value::as_object);
    let known: Vec<&str> =
        known.into_iter().flat_map(|known| known.keys()).map(String::as_str).collect();
    match arguments.keys().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let known = known.join(", ");
            Err(Error::invalid(format!("there is no argument {name:.80}; there are: {known}")))
        }
    }
}
