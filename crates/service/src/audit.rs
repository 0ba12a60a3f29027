//! Keeps what became of what sandboxes sent out, so that the next daemon knows it, too.

use std::sync::Arc;

use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use torpor_protocol::egress::EgressEvent;
use torpor_store::AuditLog;

/// Writes down until nothing can happen any more.
pub async fn keep(log: AuditLog, mut events: Receiver<Arc<EgressEvent>>) {
    loop {
        match events.recv().await {
            Ok(event) => log.note(event),
            Err(RecvError::Lagged(missed)) => log.lose(missed),
            Err(RecvError::Closed) => return,
        }
    }
}
