//! A preview as requests need it.

use tokio_util::sync::CancellationToken;
use torpor_protocol::TokenId;
use torpor_protocol::preview::Preview;
use torpor_store::TokenRow;

use super::rules::Rules;
use crate::Result;

/// A preview with its rules and tokens. It never changes.
pub struct Entry {
    /// Without its URLs.
    pub preview: Preview,
    pub rules: Rules,
    /// Oldest first.
    pub(super) tokens: Vec<Token>,
    /// Ends the visits of those who came without a token.
    pub strangers: CancellationToken,
}

/// Something that opens a preview.
#[derive(Debug, Clone)]
pub struct Token {
    pub row: TokenRow,
    /// Ends the visits of those who came with it.
    pub cut: CancellationToken,
}

impl From<TokenRow> for Token {
    fn from(row: TokenRow) -> Self {
        Self { row, cut: CancellationToken::new() }
    }
}

impl Token {
    pub(super) fn is_expired(&self, now_ms: u64) -> bool {
        self.row.expires_at_ms.is_some_and(|end| end <= now_ms)
    }
}

impl Entry {
    /// Refuses rules that can't be kept.
    pub(super) fn new(preview: Preview) -> Result<Self> {
        let rules = Rules::of(&preview)?;
        Ok(Self { preview, rules, tokens: Vec::new(), strangers: CancellationToken::new() })
    }

    /// The same preview with other properties.
    pub(super) fn with(&self, preview: Preview) -> Result<Self> {
        let private_now = self.preview.public && !preview.public;
        let strangers = if private_now { CancellationToken::new() } else { self.strangers.clone() };
        let rules = Rules::of(&preview)?;
        Ok(Self { preview, rules, tokens: self.tokens.clone(), strangers })
    }

    /// The same preview with other tokens.
    pub(super) fn with_tokens(&self, tokens: Vec<Token>) -> Self {
        let (preview, rules) = (self.preview.clone(), self.rules.clone());
        Self { preview, rules, tokens, strangers: self.strangers.clone() }
    }

    pub(super) fn token(&self, id: &TokenId) -> Option<&Token> {
        self.tokens.iter().find(|token| token.row.id == *id)
    }

    pub(super) fn cut_strangers(&self) {
        self.strangers.cancel();
    }

    pub(super) fn cut_all(&self) {
        self.strangers.cancel();
        for token in &self.tokens {
            token.cut.cancel();
        }
    }

    /// Ends the visits whose time is over.
    pub(super) fn cut_ended(&self, now_ms: u64) {
        if self.preview.is_expired(now_ms) {
            return self.cut_all();
        }
        for token in self.tokens.iter().filter(|token| token.is_expired(now_ms)) {
            token.cut.cancel();
        }
    }
}
