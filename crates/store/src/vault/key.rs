//! The vault's key: 32 bytes, in a file of the data directory or given by whoever runs the daemon.
//!
//! It is used for nothing itself: what encrypts values and what signs tokens are derived from it, so
//! neither says anything about the other.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use torpor_lifecycle::store::StoreError;

use crate::ledger::Sealed;
use crate::{Layout, files};

const KEY_LEN: usize = 32;
/// As long as the cipher wants it, and long enough to be drawn at random for every value.
const NONCE_LEN: usize = 24;
/// What the derived keys are for. Another text makes another key: these never change.
const FOR_VALUES: &str = "torpor vault: values of secrets, first version";
const FOR_SEALS: &str = "torpor vault: seals of texts, first version";

/// Base64 with or without `=` at its end.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What a vault does with its key. Shows nothing of it.
pub(super) struct Key {
    values: XChaCha20Poly1305,
    seals: [u8; KEY_LEN],
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Key {
    /// A key that somebody typed: hexadecimal or base64.
    pub(super) fn parse(text: &str) -> Result<Self, StoreError> {
        let text = text.trim();
        let bytes = hex::decode(text).ok().filter(|bytes| bytes.len() == KEY_LEN);
        let bytes =
            bytes.or_else(|| BASE64.decode(text).ok()).and_then(|bytes| bytes.try_into().ok());
        // The text is not repeated: it may be a key with one letter wrong.
        bytes.map(Self::new).ok_or_else(|| {
            StoreError::Invalid(
                "the secret key is not valid: it is 32 random bytes, written as 64 hexadecimal \
                 digits or in base64 (openssl rand -hex 32 makes one)"
                    .to_owned(),
            )
        })
    }

    /// The key in the data directory; makes one if there is none.
    pub(super) fn load(layout: &Layout) -> Result<Self, StoreError> {
        let path = layout.secret_key();
        match File::open(&path) {
            Ok(file) => read_key(file, &path).map(Self::new),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let bytes: [u8; KEY_LEN] = random()?;
                files::write_private(&path, &bytes)
                    .map_err(files::failed("write a new secret key"))?;
                Ok(Self::new(bytes))
            }
            Err(error) => Err(files::failed("read the secret key")(error)),
        }
    }

    fn new(bytes: [u8; KEY_LEN]) -> Self {
        let values = blake3::derive_key(FOR_VALUES, &bytes);
        Self {
            values: XChaCha20Poly1305::new(&values.into()),
            seals: blake3::derive_key(FOR_SEALS, &bytes),
        }
    }

    /// Encrypts a value; it opens with the same `about` only.
    pub(super) fn encrypt(&self, value: &str, about: &str) -> Result<Sealed, StoreError> {
        let nonce: [u8; NONCE_LEN] = random()?;
        let payload = Payload { msg: value.as_bytes(), aad: about.as_bytes() };
        let bytes = self.values.encrypt(&XNonce::from(nonce), payload);
        let bytes = bytes.map_err(|_| StoreError::failed("encrypt a secret")("it is too long"))?;
        Ok(Sealed { nonce: nonce.to_vec(), bytes })
    }

    /// None if it was encrypted with another key or for something else, or was changed.
    pub(super) fn decrypt(&self, sealed: &Sealed, about: &str) -> Option<String> {
        let nonce: [u8; NONCE_LEN] = sealed.nonce.as_slice().try_into().ok()?;
        let payload = Payload { msg: &sealed.bytes, aad: about.as_bytes() };
        let value = self.values.decrypt(&XNonce::from(nonce), payload).ok()?;
        String::from_utf8(value).ok()
    }

    /// A hash of texts that nobody can make without the key. Each is hashed with its length, so that
    /// no two lists of texts look the same.
    pub(super) fn hash(&self, context: &str, parts: &[&str]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.seals);
        for part in [context].iter().chain(parts) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.finalize()
    }
}

fn read_key(file: File, path: &Path) -> Result<[u8; KEY_LEN], StoreError> {
    let mut bytes = Vec::new();
    let read = file.take(KEY_LEN as u64 + 1).read_to_end(&mut bytes);
    read.map_err(files::failed("read the secret key"))?;
    bytes.try_into().map_err(|_| {
        StoreError::Invalid(format!(
            "{} is no secret key, which has {KEY_LEN} bytes: put the right file in its place, or \
             remove it and set every secret again",
            path.display()
        ))
    })
}

fn random<const N: usize>() -> Result<[u8; N], StoreError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(StoreError::failed("get random bytes"))?;
    Ok(bytes)
}
