//! Tokens: made, shown once, recognised, revoked.
//!
//! A browser gets a cookie for its token that names the token and is sealed by the vault, for this
//! preview only. So whatever ends a token ends its cookies, and a cookie is not a token.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use torpor_protocol::preview::{CreatePreviewToken, PreviewToken, TOKEN_QUERY};
use torpor_protocol::{ErrorCode, Name, PreviewTarget, TokenId};
use torpor_store::{TokenRow, Vault};

use super::entry::{Entry, Token};
use super::{Previews, end};
use crate::error::{Error, Result};

/// What every token starts with, so that people and secret scanners recognise one.
const PREFIX: &str = "tpv_";
/// A longer text is no token, and not worth hashing.
const TEXT_MAX: usize = 256;
/// Tokens of one preview that are valid at the same time: all are compared with every one that comes.
const TOKENS_MAX: usize = 256;
/// What the seals of cookies are for. Another text makes another seal.
const CONTEXT: &str = "the cookie of a preview";

impl Previews {
    /// Makes a token. Its text is given out here and never again.
    pub async fn create_token(
        &self,
        target: &PreviewTarget,
        name: &Name,
        request: CreatePreviewToken,
    ) -> Result<PreviewToken> {
        let _writing = self.version.writing().await;
        let entry = self.find(target, name)?;
        let now_ms = self.now_ms();
        let mut tokens = entry.tokens.clone();
        for old in tokens.extract_if(.., |token| token.is_expired(now_ms)) {
            self.ledger.erase_preview_token(&old.row.id).await?;
        }
        if tokens.len() >= TOKENS_MAX {
            let message = format!("a preview has at most {TOKENS_MAX} tokens");
            return Err(Error::with_hint(ErrorCode::LimitReached, message, "delete some"));
        }
        let text = fresh();
        let row = TokenRow {
            id: TokenId::random(),
            preview: entry.preview.id.clone(),
            hash: hash(&text),
            expires_at_ms: end(now_ms, request.ttl_ms, request.expires_at_ms)?,
            created_at_ms: now_ms,
        };
        self.ledger.record_preview_token(&row).await?;
        let urls = self.shown(&entry).urls;
        let urls = urls.iter().map(|url| format!("{url}?{TOKEN_QUERY}={text}")).collect();
        let made = PreviewToken { token: Some(text), urls, ..shown(&row, now_ms) };
        tokens.push(row.into());
        self.known.write().put(Arc::new(entry.with_tokens(tokens)));
        Ok(made)
    }

    /// The tokens of a preview, without their texts.
    pub fn tokens(&self, target: &PreviewTarget, name: &Name) -> Result<Vec<PreviewToken>> {
        let (entry, now_ms) = (self.find(target, name)?, self.now_ms());
        Ok(entry.tokens.iter().map(|token| shown(&token.row, now_ms)).collect())
    }

    /// Opens nothing any more when this returns; what it had opened is being cut off.
    pub async fn revoke(&self, target: &PreviewTarget, name: &Name, id: &TokenId) -> Result<()> {
        let _writing = self.version.writing().await;
        let entry = self.find(target, name)?;
        let Some(token) = entry.token(id) else {
            return Err(Error::new(ErrorCode::NotFound, "the preview has no such token"));
        };
        self.ledger.erase_preview_token(id).await?;
        let rest = entry.tokens.iter().filter(|token| token.row.id != *id).cloned().collect();
        self.known.write().put(Arc::new(entry.with_tokens(rest)));
        token.cut.cancel();
        Ok(())
    }
}

impl Entry {
    /// The token that this text is, if it is one that is valid.
    pub fn opened_by(&self, text: &str, now_ms: u64) -> Option<&Token> {
        if text.len() > TEXT_MAX {
            return None;
        }
        let hash = hash(text);
        let mut found = None;
        for token in &self.tokens {
            if bool::from(token.row.hash.ct_eq(&hash)) {
                found = Some(token);
            }
        }
        found.filter(|token| !token.is_expired(now_ms))
    }

    /// The same for a cookie.
    pub fn opened_by_cookie(&self, vault: &Vault, cookie: &str, now_ms: u64) -> Option<&Token> {
        let (id, seal) = cookie.split_once('.')?;
        let token = self.token(&id.parse().ok()?)?;
        let sealed = vault.sealed(CONTEXT, &[self.preview.id.as_str(), id], seal);
        (sealed && !token.is_expired(now_ms)).then_some(token)
    }

    /// The cookie for who came with this token.
    pub fn cookie(&self, vault: &Vault, token: &Token) -> String {
        let id = token.row.id.as_str();
        format!("{id}.{}", vault.seal(CONTEXT, &[self.preview.id.as_str(), id]))
    }
}

fn shown(row: &TokenRow, now_ms: u64) -> PreviewToken {
    PreviewToken {
        id: row.id.clone(),
        expires_at_ms: row.expires_at_ms,
        created_at_ms: row.created_at_ms,
        expired: row.expires_at_ms.is_some_and(|end| end <= now_ms),
        token: None,
        urls: Vec::new(),
    }
}

fn fresh() -> String {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).expect("the system has entropy");
    format!("{PREFIX}{}", hex::encode(bytes))
}

fn hash(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}
