//! Answers that come compressed although they were asked for as they are.
//!
//! Secrets can't be found in compressed bytes. So `gzip` and `deflate` are undone while they stream, and an
//! answer in any other coding is refused. What one step unpacks is bounded, however much was packed.

use std::io::{self, Write};

use bytes::{Buf, Bytes};
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use http::header::{self, HeaderMap, HeaderName};

use super::headers::GRPC_ENCODING;

/// Bytes that are unpacked at once; one call of a decoder may add its own buffer to it.
const STEP: usize = 64 << 10;

/// A coding that can be undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    Gzip,
    Deflate,
}

impl Coding {
    /// What an answer with these headers is coded in; none: it is as it is. The name of a coding that
    /// can't be undone otherwise.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Self>, String> {
        let named = |name: HeaderName, usual: &'static str| -> Vec<String> {
            let values = headers.get_all(name).iter().map(|value| value.as_bytes());
            let tokens = values.flat_map(|value| value.split(|byte| *byte == b','));
            let tokens = tokens.map(|token| String::from_utf8_lossy(token.trim_ascii()));
            let tokens = tokens.map(|token| token.to_ascii_lowercase());
            tokens.filter(|token| !token.is_empty() && token != usual).collect()
        };
        let inside = named(header::CONTENT_ENCODING, "identity");
        let others = [
            named(header::TRANSFER_ENCODING, "chunked"),
            named(GRPC_ENCODING, "identity"),
            named(header::SEC_WEBSOCKET_EXTENSIONS, ""),
        ]
        .concat();
        match inside.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            _ if !others.is_empty() => Err(others.join(", ")),
            [] => Ok(None),
            ["gzip" | "x-gzip"] => Ok(Some(Self::Gzip)),
            ["deflate"] => Ok(Some(Self::Deflate)),
            [..] => Err(inside.join(", ")),
        }
    }
}

/// Undoes a coding.
pub(super) struct Decoder {
    inner: Inner,
    begun: bool,
}

enum Inner {
    Gzip(MultiGzDecoder<Vec<u8>>),
    Deflate(ZlibDecoder<Vec<u8>>),
}

impl Decoder {
    pub(super) fn new(coding: Coding) -> Self {
        let inner = match coding {
            Coding::Gzip => Inner::Gzip(MultiGzDecoder::new(Vec::new())),
            Coding::Deflate => Inner::Deflate(ZlibDecoder::new(Vec::new())),
        };
        Self { inner, begun: false }
    }

    /// What the beginning of `coded` stands for; the rest of it is for the next call.
    pub(super) fn step(&mut self, coded: &mut Bytes) -> io::Result<Vec<u8>> {
        self.begun |= !coded.is_empty();
        while !coded.is_empty() && self.plain().len() < STEP {
            let count = self.writer().write(coded)?;
            if count == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "more than was announced"));
            }
            coded.advance(count);
        }
        if coded.is_empty() {
            self.writer().flush()?;
        }
        Ok(std::mem::take(self.plain()))
    }

    /// What is left when nothing more comes; an error if something of `gzip` is missing.
    pub(super) fn end(&mut self) -> io::Result<Vec<u8>> {
        if self.begun {
            match &mut self.inner {
                Inner::Gzip(decoder) => decoder.try_finish()?,
                Inner::Deflate(decoder) => decoder.try_finish()?,
            }
        }
        Ok(std::mem::take(self.plain()))
    }

    fn writer(&mut self) -> &mut dyn Write {
        match &mut self.inner {
            Inner::Gzip(decoder) => decoder,
            Inner::Deflate(decoder) => decoder,
        }
    }

    fn plain(&mut self) -> &mut Vec<u8> {
        match &mut self.inner {
            Inner::Gzip(decoder) => decoder.get_mut(),
            Inner::Deflate(decoder) => decoder.get_mut(),
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};

    use super::*;

    fn gzip(plain: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn decoded(coding: Coding, pieces: &[&[u8]]) -> io::Result<Vec<u8>> {
        let mut decoder = Decoder::new(coding);
        let mut plain = Vec::new();
        for piece in pieces {
            let mut piece = Bytes::copy_from_slice(piece);
            while !piece.is_empty() {
                plain.extend(decoder.step(&mut piece)?);
            }
        }
        plain.extend(decoder.end()?);
        Ok(plain)
    }

    #[test]
    fn what_was_packed_comes_out_however_it_is_split() {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(b"hello, hello, hello").unwrap();
        let guests = [gzip(b"hello, "), gzip(b"hello, hello")].concat();
        for (coding, packed) in
            [(Coding::Gzip, guests), (Coding::Deflate, encoder.finish().unwrap())]
        {
            for at in 0..=packed.len() {
                let plain = decoded(coding, &[&packed[..at], &packed[at..]]).unwrap();
                assert_eq!(plain, b"hello, hello, hello", "{coding:?} {at}");
            }
            assert!(decoded(coding, &[b"no such thing"]).is_err(), "{coding:?}");
            assert!(decoded(coding, &[]).unwrap().is_empty(), "an empty body is fine");
        }
    }

    #[test]
    fn what_is_missing_at_the_end_is_missed() {
        let packed = gzip(b"hello");
        for length in 1..packed.len() {
            assert!(decoded(Coding::Gzip, &[&packed[..length]]).is_err(), "{length}");
        }
    }

    #[test]
    fn what_was_said_so_far_does_not_wait_for_the_end() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(b"event").unwrap();
        encoder.flush().unwrap();
        let mut first = Bytes::copy_from_slice(encoder.get_ref());
        assert_eq!(Decoder::new(Coding::Gzip).step(&mut first).unwrap(), b"event");
    }

    #[test]
    fn a_step_is_bounded_however_much_was_packed() {
        let mut packed = Bytes::from(gzip(&vec![0; 16 << 20]));
        let mut decoder = Decoder::new(Coding::Gzip);
        let mut whole = 0;
        while !packed.is_empty() {
            let plain = decoder.step(&mut packed).unwrap();
            assert!(plain.len() <= 4 * STEP, "{}", plain.len());
            whole += plain.len();
        }
        assert_eq!(whole + decoder.end().unwrap().len(), 16 << 20);
    }

    #[test]
    fn only_one_coding_that_is_known_is_undone() {
        let of = |headers: &[(&'static str, &'static str)]| {
            let pairs = headers.iter().map(|(name, value)| {
                (HeaderName::from_static(name), http::HeaderValue::from_static(value))
            });
            Coding::of(&HeaderMap::from_iter(pairs))
        };
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(
            of(&[("content-encoding", "Identity"), ("transfer-encoding", "chunked")]),
            Ok(None)
        );
        assert_eq!(of(&[("content-encoding", "GZIP")]), Ok(Some(Coding::Gzip)));
        assert_eq!(of(&[("content-encoding", "deflate")]), Ok(Some(Coding::Deflate)));
        for refused in [
            ("content-encoding", "br"),
            ("content-encoding", "zstd"),
            ("content-encoding", "gzip, gzip"),
            ("transfer-encoding", "gzip, chunked"),
            ("grpc-encoding", "gzip"),
            ("sec-websocket-extensions", "permessage-deflate"),
        ] {
            assert!(of(&[refused]).is_err(), "{refused:?}");
        }
    }
}
