//! What became of every call: written down soon, in the order in which calls ended, and told to who follows.
//!
//! - Who notes a call does not wait for the disk. What finds the queue full is lost, and the log says how many.
//! - No value of an argument is noted: its names and types, and a hash under the vault's key.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::Instant;
use torpor_lifecycle::chain;
use torpor_protocol::mcp_gateway::{McpCall, McpOutcome};
use torpor_service::{Result, Service};

use crate::canonical;
use crate::suspicion;

/// Calls that wait for the disk, and calls of one write.
const QUEUE: usize = 4096;
const BATCH: usize = 256;
/// Calls that who follows may be behind.
const BEHIND: usize = 1024;
/// So long calls gather before they are written.
const GATHER: Duration = Duration::from_millis(50);
/// Characters of a name, of a shape, and of a reason.
const NAME_MAX: usize = 160;
const SHAPE_MAX: usize = 1000;
const REASON_MAX: usize = 500;
/// Levels of a shape.
const LEVELS: usize = 3;

enum Order {
    Write(Box<McpCall>),
    Tell(oneshot::Sender<()>),
}

pub(crate) struct Calls {
    service: Arc<Service>,
    queue: mpsc::Sender<Order>,
    feed: broadcast::Sender<Arc<McpCall>>,
    lost: AtomicU64,
}

/// What happens from now on.
pub type CallFeed = broadcast::Receiver<Arc<McpCall>>;

impl Calls {
    pub(crate) fn new(service: &Arc<Service>) -> Self {
        let (queue, orders) = mpsc::channel(QUEUE);
        let (feed, _) = broadcast::channel(BEHIND);
        tokio::spawn(write(Arc::clone(service), orders));
        Self { service: Arc::clone(service), queue, feed, lost: AtomicU64::new(0) }
    }

    pub(crate) fn follow(&self) -> CallFeed {
        self.feed.subscribe()
    }

    fn note(&self, call: McpCall, known: bool, kept: bool) {
        self.service.metrics.mcp_called(&call, known);
        if !kept {
            return;
        }
        // Nobody may be following.
        let _ = self.feed.send(Arc::new(call.clone()));
        if self.queue.try_send(Order::Write(Box::new(call))).is_err() {
            let lost = self.lost.fetch_add(1, Ordering::Relaxed) + 1;
            tracing::warn!(lost, "calls of MCP tools came faster than they could be written down");
        }
    }

    pub(crate) async fn flush(&self) {
        let (tell, told) = oneshot::channel();
        if self.queue.send(Order::Tell(tell)).await.is_ok() {
            // A writer that is gone has nothing more to write.
            let _ = told.await;
        }
    }

    /// At most `limit` before this id, newest first.
    pub(crate) async fn recent(&self, before: Option<u64>, limit: usize) -> Result<Vec<McpCall>> {
        self.flush().await;
        Ok(self.service.ledger.mcp_calls(before, limit).await?)
    }

    /// A call that begins.
    pub(crate) fn begin<'a>(
        &'a self,
        key: &str,
        server: &str,
        tool: &str,
        arguments: &Value,
    ) -> Noted<'a> {
        let hash = self.service.vault.seal("torpor mcp arguments", &[&canonical::text(arguments)]);
        let call = McpCall {
            id: 0,
            at_ms: self.service.fleet.clock().now_ms(),
            key: key.to_owned(),
            server: cut(server, NAME_MAX),
            tool: cut(tool, NAME_MAX),
            arguments: shape(arguments),
            arguments_hash: hash,
            result_bytes: 0,
            took_us: 0,
            outcome: McpOutcome::Cancelled,
            reason: None,
            revision: None,
        };
        Noted { calls: self, call, known: false, kept: true, begun: Instant::now() }
    }
}

/// A call under way. It is noted however it ends; who drops it went away.
pub(crate) struct Noted<'a> {
    calls: &'a Calls,
    pub(crate) call: McpCall,
    /// Whether it is of something that was approved.
    pub(crate) known: bool,
    /// Whether it is remembered, and not only counted.
    pub(crate) kept: bool,
    begun: Instant,
}

impl Noted<'_> {
    pub(crate) fn ended(&mut self, outcome: McpOutcome, reason: Option<&str>) {
        self.call.outcome = outcome;
        self.call.reason = reason.map(|text| text.chars().take(REASON_MAX).collect());
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        self.call.took_us = u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.calls.note(self.call.clone(), self.known, self.kept);
    }
}

async fn write(service: Arc<Service>, mut orders: mpsc::Receiver<Order>) {
    let mut batch = Vec::with_capacity(BATCH);
    while orders.recv_many(&mut batch, BATCH).await > 0 {
        if batch.iter().all(|order| matches!(order, Order::Write(_))) && batch.len() < BATCH {
            tokio::time::sleep(GATHER).await;
            while batch.len() < BATCH
                && let Ok(order) = orders.try_recv()
            {
                batch.push(order);
            }
        }
        let (mut calls, mut waiting) = (Vec::new(), Vec::new());
        for order in batch.drain(..) {
            match order {
                Order::Write(call) => calls.push(*call),
                Order::Tell(tell) => waiting.push(tell),
            }
        }
        if !calls.is_empty()
            && let Err(error) = service.ledger.record_mcp_calls(&calls).await
        {
            let (lost, error) = (calls.len(), chain(&error));
            tracing::error!(lost, error, "calls of MCP tools not written down");
        }
        for tell in waiting {
            let _ = tell.send(());
        }
    }
}

/// Names and types of arguments.
fn shape(arguments: &Value) -> String {
    let mut out = String::new();
    write_shape(&mut out, arguments, 0);
    cut(&out, SHAPE_MAX)
}

/// So many characters of a text as it is shown. Cut at last: what is written out takes more room.
fn cut(text: &str, most: usize) -> String {
    let some: String = text.chars().take(most + 1).collect();
    let shown = suspicion::shown(&some);
    match shown.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None => shown,
    }
}

fn write_shape(out: &mut String, value: &Value, level: usize) {
    // What is cut later is not written.
    if out.len() > SHAPE_MAX * 4 {
        return;
    }
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(_) => out.push_str("boolean"),
        Value::Number(_) => out.push_str("number"),
        Value::String(text) => drop(write!(out, "string({})", text.len())),
        Value::Array(values) => {
            let _ = write!(out, "array({})", values.len());
        }
        Value::Object(fields) if level >= LEVELS => drop(write!(out, "object({})", fields.len())),
        Value::Object(fields) => {
            out.push('{');
            for (at, (name, value)) in fields.iter().enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                out.extend(name.chars().take(64));
                out.push_str(": ");
                write_shape(out, value, level + 1);
            }
            out.push('}');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_shape_has_names_and_types_and_no_value() {
        let arguments = json!({"path": "/etc/passwd", "n": 7, "deep": {"a": {"b": {"c": "secret"}}}, "l": [1, 2]});
        let text = shape(&arguments);
        assert_eq!(text, "{deep: {a: {b: object(1)}}, l: array(2), n: number, path: string(11)}");
        let many: serde_json::Map<_, _> =
            (0..5000).map(|n| (format!("field{n}"), json!(1))).collect();
        assert!(shape(&Value::Object(many)).len() < 2 * SHAPE_MAX);
        // One character that is written out as eight.
        let hidden: serde_json::Map<_, _> =
            (0..5000).map(|n| ("\u{e0041}".repeat(60) + &n.to_string(), json!(1))).collect();
        assert!(shape(&Value::Object(hidden)).chars().count() <= SHAPE_MAX + 1);
        assert_eq!(cut(&"\u{e0041}".repeat(NAME_MAX), NAME_MAX).chars().count(), NAME_MAX + 1);
        assert_eq!(cut("name", 4), "name");
    }
}
