//! What was answered to requests that a client may repeat.

use serde::{Deserialize, Serialize};
use torpor_lifecycle::store::StoreError;

use super::Vault;
use crate::ledger::Begun;

/// Tells these hashes and values from all others of the vault.
const CONTEXT: &str = "idempotency";
/// Bytes of an answer that is kept.
const ANSWER_MAX: usize = 256 * 1024;

/// A request that its client may repeat: who sent it, under which key, and a digest of what it asks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestKey {
    /// Nobody else's, whatever keys others choose.
    pub id: String,
    fingerprint: String,
}

/// An answer as it was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAnswer {
    pub status: u16,
    pub content_type: Option<String>,
    pub body: String,
}

/// What is known of a request that is begun now.
#[derive(Debug, PartialEq, Eq)]
pub enum Repeated {
    /// Nothing: it is to be done.
    New,
    /// It was begun before, and how it ended is not known.
    Unanswered,
    Answered(KeptAnswer),
    /// The key was sent with another request.
    Other,
}

impl Vault {
    pub fn request_key(&self, caller: &str, key: &str, asked: &[&str]) -> RequestKey {
        let id = self.seal(CONTEXT, &[caller, key]);
        RequestKey { id, fingerprint: self.seal(CONTEXT, asked) }
    }

    /// Notes that a request begins, if nothing is known of it.
    pub async fn begin_request(
        &self,
        request: &RequestKey,
        now_ms: u64,
    ) -> Result<Repeated, StoreError> {
        let begun = self.ledger.begin_request(&request.id, &request.fingerprint, now_ms).await?;
        Ok(match begun {
            Begun::New => Repeated::New,
            Begun::Unanswered => Repeated::Unanswered,
            Begun::Other => Repeated::Other,
            Begun::Answered(sealed) => {
                let text = self.key.decrypt(&sealed, &about(request));
                // Under another secret key nobody can tell.
                let answer = text.and_then(|text| serde_json::from_str(&text).ok());
                answer.map_or(Repeated::Unanswered, Repeated::Answered)
            }
        })
    }

    /// Remembers an answer. One that is too large is not kept: then nobody knows how it ended.
    pub async fn keep_answer(
        &self,
        request: &RequestKey,
        answer: &KeptAnswer,
    ) -> Result<(), StoreError> {
        let action = "record the answer to a request";
        let text = serde_json::to_string(answer).map_err(StoreError::failed(action))?;
        if text.len() > ANSWER_MAX {
            return Ok(());
        }
        let sealed = self.key.encrypt(&text, &about(request))?;
        self.ledger.answer_request(&request.id, &sealed).await
    }
}

/// An answer opens for its own request only.
fn about(request: &RequestKey) -> String {
    format!("{CONTEXT} {} {}", request.id, request.fingerprint)
}
