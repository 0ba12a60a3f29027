//! Between an MCP client on standard input and output and one of the daemon's MCP servers: a line is a
//! message, and each request is one of HTTP.
//!
//! - Both eras pass unchanged; what was agreed on with `initialize` is remembered for the headers.
//! - `notifications/cancelled` closes the request that it names, which is how the daemon hears of it.
//! - Whatever goes wrong on the way is the answer to the request that it befell; the bridge goes on, and so
//!   it does when the daemon is started anew.

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use torpor_client::{Client, Route};

use crate::error::{Error, Result};

/// Longest message: the largest body that the daemon takes.
const LINE_MAX: u64 = 4 * 1024 * 1024;
/// Requests under way; more wait for their turn.
const AT_ONCE: usize = 32;
/// Messages on their way to a slow reader.
const QUEUE: usize = 64;
/// What is being answered when standard input ends may still be said for so long.
const LAST_WORDS: Duration = Duration::from_secs(2);
const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const SERVER_ERROR: i32 = -32000;

#[derive(Clone)]
struct Bridge {
    client: Client,
    route: Route,
    /// What was agreed on with `initialize`.
    version: Arc<Mutex<Option<String>>>,
    /// Requests under way, by their ids as they were written.
    open: Arc<Mutex<HashMap<String, AbortHandle>>>,
    turns: Arc<Semaphore>,
    out: mpsc::Sender<Value>,
}

pub(super) async fn run(client: &Client, route: Route) -> Result<ExitCode> {
    let (out, said) = mpsc::channel(QUEUE);
    let bridge = Bridge {
        client: client.clone(),
        route,
        version: Arc::default(),
        open: Arc::default(),
        turns: Arc::new(Semaphore::new(AT_ONCE)),
        out,
    };
    let mut writer = tokio::spawn(write(said));
    tokio::select! {
        read = bridge.read() => read?,
        // Nobody reads what is said.
        _ = &mut writer => return Err(Error::BrokenPipe),
    }
    match tokio::time::timeout(LAST_WORDS, writer).await {
        Ok(_) | Err(_) => Ok(ExitCode::SUCCESS),
    }
}

async fn write(mut said: mpsc::Receiver<Value>) {
    let mut stdout = tokio::io::stdout();
    while let Some(message) = said.recv().await {
        let line = format!("{message}\n");
        if stdout.write_all(line.as_bytes()).await.is_err() || stdout.flush().await.is_err() {
            return;
        }
    }
}

impl Bridge {
    /// Until standard input ends, and then for what is nearly said.
    async fn read(self) -> Result<()> {
        let mut stdin = BufReader::new(tokio::io::stdin());
        let mut requests = JoinSet::new();
        loop {
            let mut line = Vec::new();
            let read = (&mut stdin).take(LINE_MAX + 1).read_until(b'\n', &mut line).await;
            if read.map_err(|error| Error::local("read standard input", error))? == 0 {
                break;
            }
            if line.len() as u64 > LINE_MAX && !line.ends_with(b"\n") {
                let what = format!("a message has at most {LINE_MAX} bytes");
                self.say(refusal(Value::Null, INVALID_REQUEST, &what)).await;
                skip_line(&mut stdin).await?;
                continue;
            }
            if !line.trim_ascii().is_empty() {
                self.take(&line, &mut requests).await;
            }
            while requests.try_join_next().is_some() {}
        }
        let answers = async { while requests.join_next().await.is_some() {} };
        // What takes longer is cancelled.
        let _ = tokio::time::timeout(LAST_WORDS, answers).await;
        Ok(())
    }

    async fn take(&self, line: &[u8], requests: &mut JoinSet<()>) {
        let message: Value = match serde_json::from_slice(line) {
            Ok(message) => message,
            Err(error) => {
                let what = format!("this is no JSON: {error}");
                return self.say(refusal(Value::Null, PARSE_ERROR, &what)).await;
            }
        };
        if !message.is_object() {
            let what = "a message is a JSON object, one in a line";
            return self.say(refusal(Value::Null, INVALID_REQUEST, what)).await;
        }
        if message["method"] == "notifications/cancelled" {
            let asked = self.open.lock().remove(&message["params"]["requestId"].to_string());
            return asked.into_iter().for_each(|request| request.abort());
        }
        // Answers to what we never ask.
        if message.get("method").is_none() {
            return;
        }
        let id = message.get("id").cloned();
        let bridge = self.clone();
        let key = id.as_ref().map(ToString::to_string);
        // Held until the request is known, so that it can't end before.
        let mut open = self.open.lock();
        let request = requests.spawn(async move { bridge.forward(message, id).await });
        if let Some(key) = key {
            open.insert(key, request);
        }
    }

    async fn forward(self, message: Value, id: Option<Value>) {
        let Ok(_turn) = self.turns.acquire().await else { return };
        let exchanged = self.exchange(&message, id.as_ref()).await;
        let Some(id) = id else { return };
        self.open.lock().remove(&id.to_string());
        match exchanged {
            Ok(true) => {}
            Ok(false) => {
                let what = "the daemon gave no answer";
                self.say(refusal(id, SERVER_ERROR, what)).await;
            }
            Err(error) => self.say(refusal(id, SERVER_ERROR, &why(&error))).await,
        }
    }

    /// Whether the request was answered.
    async fn exchange(
        &self,
        message: &Value,
        id: Option<&Value>,
    ) -> Result<bool, torpor_client::Error> {
        let version = self.version.lock().clone();
        let mut answers = self.client.mcp(&self.route, message, version.as_deref()).await?;
        let mut answered = false;
        while let Some(mut answer) = answers.next().await? {
            if answer.get("method").is_none() {
                let Some(id) = id else { continue };
                // A refusal that came before anybody read the message does not know its id.
                answer["id"] = id.clone();
                answered = true;
                if message["method"] == "initialize" {
                    let agreed = answer["result"]["protocolVersion"].as_str();
                    *self.version.lock() = agreed.map(str::to_owned);
                }
            }
            self.say(answer).await;
        }
        Ok(answered)
    }

    /// Who does not read any more is not told.
    async fn say(&self, message: Value) {
        let _ = self.out.send(message).await;
    }
}

async fn skip_line(stdin: &mut BufReader<tokio::io::Stdin>) -> Result<()> {
    loop {
        let mut rest = Vec::new();
        let read = (&mut *stdin).take(LINE_MAX).read_until(b'\n', &mut rest).await;
        let read = read.map_err(|error| Error::local("read standard input", error))?;
        if read == 0 || rest.ends_with(b"\n") {
            return Ok(());
        }
    }
}

fn refusal(id: Value, code: i32, message: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
}

fn why(error: &torpor_client::Error) -> String {
    let mut text = format!("torpor: {error}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
