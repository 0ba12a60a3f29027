//! All previews in memory, as requests need them. Versioned (see [`torpor_lifecycle::ledger`]).

use std::collections::HashMap;
use std::sync::Arc;

use torpor_lifecycle::ledger::{PAGE, everything};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::preview::{Preview, PreviewLabel};
use torpor_protocol::{PreviewId, TokenId};
use torpor_store::{Ledger, TokenRow};

use super::Previews;
use super::entry::{Entry, Token};

#[derive(Default)]
pub(super) struct Known {
    pub(super) entries: HashMap<PreviewId, Arc<Entry>>,
    pub(super) labels: HashMap<PreviewLabel, PreviewId>,
}

impl Known {
    pub(super) fn put(&mut self, entry: Arc<Entry>) {
        let id = entry.preview.id.clone();
        self.labels.insert(entry.preview.label.clone(), id.clone());
        self.entries.insert(id, entry);
    }

    pub(super) fn forget(&mut self, id: &PreviewId) -> Option<Arc<Entry>> {
        let entry = self.entries.remove(id)?;
        self.labels.remove(&entry.preview.label);
        Some(entry)
    }

    /// The same as it is recorded now. Who visits what is still open stays.
    pub(super) fn updated(&self, recorded: Vec<(Preview, Vec<TokenRow>)>) -> Self {
        let mut known = Self::default();
        for (preview, rows) in recorded {
            let id = preview.id.clone();
            let old = self.entries.get(&id);
            let token = |row: TokenRow| {
                let before = old.and_then(|old| old.token(&row.id)).cloned();
                before.unwrap_or_else(|| Token::from(row))
            };
            let tokens: Vec<_> = rows.into_iter().map(token).collect();
            match old.map_or_else(|| Entry::new(preview.clone()), |old| old.with(preview.clone())) {
                Ok(entry) => known.put(Arc::new(Entry { tokens, ..entry })),
                Err(error) => tracing::error!(preview = %id, %error, "it is not served"),
            }
        }
        self.entries
            .values()
            .for_each(|old| old.cut_what_is_over(known.entries.get(&old.preview.id)));
        known
    }
}

impl Entry {
    /// Ends the visits that what became of it does not allow.
    fn cut_what_is_over(&self, now: Option<&Arc<Entry>>) {
        let Some(now) = now else { return self.cut_all() };
        if self.preview.public && !now.preview.public {
            self.cut_strangers();
        }
        for token in self.tokens.iter().filter(|token| now.token(&token.row.id).is_none()) {
            token.cut.cancel();
        }
    }
}

impl Previews {
    /// Learns what other nodes changed.
    pub(crate) async fn refresh(&self) -> Result<(), StoreError> {
        let read = async {
            let recorded = recorded(&self.ledger).await?;
            let mut known = self.known.write();
            *known = known.updated(recorded);
            Ok(())
        };
        self.version.refresh(read).await
    }
}

/// Every preview with its tokens, oldest token first.
pub(super) async fn recorded(ledger: &Ledger) -> Result<Vec<(Preview, Vec<TokenRow>)>, StoreError> {
    let page =
        |after: Option<TokenId>| async move { ledger.preview_tokens(after.as_ref(), PAGE).await };
    let mut tokens = everything(page, |row| row.id.clone()).await?;
    tokens.sort_by_key(|row| row.created_at_ms);
    let mut of: HashMap<PreviewId, Vec<TokenRow>> = HashMap::new();
    for token in tokens {
        of.entry(token.preview.clone()).or_default().push(token);
    }
    let page =
        |after: Option<PreviewId>| async move { ledger.previews(after.as_ref(), PAGE).await };
    let previews = everything(page, |preview| preview.id.clone()).await?;
    let with_tokens = |preview: Preview| {
        let tokens = of.remove(&preview.id).unwrap_or_default();
        (preview, tokens)
    };
    Ok(previews.into_iter().map(with_tokens).collect())
}
