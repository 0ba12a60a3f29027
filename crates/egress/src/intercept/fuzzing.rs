//! Entry points of fuzz targets: what holds whatever a service answers.

use crate::fuzzing::input;
use std::io;
use std::sync::OnceLock;

use bytes::Bytes;
use torpor_protocol::SecretName;

use super::decode::{Coding, Decoder};
use super::forms;
use super::redact::{Needles, Sieve};

/// Some begin like others, and some repeat themselves.
const SECRETS: [&str; 6] = ["aaab", "abab", "token", "token-long-one", "en-long", "s3cr3t value"];
/// Shorter forms are not looked for.
const FORM_MIN: usize = 4;
/// Bytes that one step of decoding gives at most, with the buffer of the decoder.
const STEP_MAX: usize = 128 << 10;

/// However an answer is cut, the same comes out, as long as it was and without a form of a secret.
pub fn redact(bytes: &[u8]) {
    let Some((content, pieces)) = input::pieces(bytes) else { return };
    let whole = sieved(&[content]);
    assert_eq!(sieved(&pieces), whole);
    assert_eq!(whole.len(), content.len(), "its length stays");
    static FORMS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    let all = || SECRETS.into_iter().flat_map(forms::all).collect();
    for form in FORMS.get_or_init(all).iter().filter(|form| form.len() >= FORM_MIN) {
        let shown = whole.windows(form.len()).any(|text| text == form);
        assert!(!shown, "{} is shown", form.escape_ascii());
    }
}

fn sieved(pieces: &[&[u8]]) -> Vec<u8> {
    static NEEDLES: OnceLock<Needles> = OnceLock::new();
    let needles = NEEDLES.get_or_init(|| {
        let names: Vec<SecretName> = (0..SECRETS.len())
            .map(|number| format!("S{number}").parse().expect("it is a name"))
            .collect();
        Needles::of(&names.iter().zip(SECRETS).collect::<Vec<_>>())
    });
    let mut sieve = Sieve::new(needles.clone());
    let mut out: Vec<u8> = pieces.iter().flat_map(|piece| sieve.push(piece)).collect();
    out.extend(sieve.end());
    out
}

/// However a compressed answer is cut, the same comes out of it or it is refused; no step of it gives
/// much.
pub fn decode(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let Some((content, pieces)) = input::pieces(rest) else { return };
    let coding = if kind % 2 == 0 { Coding::Gzip } else { Coding::Deflate };
    let whole = decoded(coding, &[content]).ok();
    assert_eq!(decoded(coding, &pieces).ok(), whole);
}

fn decoded(coding: Coding, pieces: &[&[u8]]) -> io::Result<Vec<u8>> {
    let mut decoder = Decoder::new(coding);
    let mut out = Vec::new();
    for piece in pieces {
        let mut piece = Bytes::copy_from_slice(piece);
        loop {
            let step = decoder.step(&mut piece)?;
            assert!(step.len() <= STEP_MAX, "{} bytes at once", step.len());
            out.extend(step);
            if piece.is_empty() {
                break;
            }
        }
    }
    out.extend(decoder.end()?);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_redact() {
        input::replay("redact", redact);
    }

    #[test]
    fn no_seed_breaks_decode() {
        input::replay("decode", decode);
    }
}
