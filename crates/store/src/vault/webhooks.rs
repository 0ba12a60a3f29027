//! Secrets of webhooks, and of deliveries that are sent once: made here or given, sealed for whom they sign, and
//! never given to anybody but who signs.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use torpor_lifecycle::store::StoreError;

use super::Vault;
use crate::ledger::Sealed;

/// Tells people and scanners what it is; Standard Webhooks has it so.
const PREFIX: &str = "whsec_";
/// Bytes of a key that is made here.
const KEY_LEN: usize = 32;
/// Bytes that a key may have that was given: as Standard Webhooks has it.
const KEY_LENS: std::ops::RangeInclusive<usize> = 24..=64;

impl Vault {
    /// A fresh secret, sealed for this webhook.
    pub fn make_webhook_secret(&self, id: &str) -> Result<(String, Sealed), StoreError> {
        let mut key = [0; KEY_LEN];
        getrandom::fill(&mut key).map_err(StoreError::failed("get random bytes"))?;
        let text = format!("{PREFIX}{}", STANDARD.encode(key));
        let sealed = self.seal_webhook_secret(id, &text)?;
        Ok((text, sealed))
    }

    /// Seals a secret for a webhook, or for a delivery that is sent once.
    pub fn seal_webhook_secret(&self, id: &str, secret: &str) -> Result<Sealed, StoreError> {
        if signing_key(secret).is_none() {
            return Err(StoreError::Invalid(format!(
                "a secret of webhooks is {PREFIX} and {} to {} bytes in base64",
                KEY_LENS.start(),
                KEY_LENS.end()
            )));
        }
        self.key.encrypt(secret, &about(id))
    }

    /// The key that signs for this webhook or delivery.
    pub fn webhook_key(&self, id: &str, sealed: &Sealed) -> Result<Vec<u8>, StoreError> {
        let text = self.key.decrypt(sealed, &about(id));
        text.as_deref().and_then(signing_key).ok_or_else(|| {
            StoreError::Invalid(format!(
                "the secret of {id} can't be decrypted: it was set under another secret key; give it \
                 another one"
            ))
        })
    }
}

/// The bytes that a secret stands for.
fn signing_key(secret: &str) -> Option<Vec<u8>> {
    let key = STANDARD.decode(secret.strip_prefix(PREFIX)?).ok()?;
    KEY_LENS.contains(&key.len()).then_some(key)
}

/// What a secret belongs to: it does not open for another one.
fn about(id: &str) -> String {
    format!("webhook\n{id}")
}
