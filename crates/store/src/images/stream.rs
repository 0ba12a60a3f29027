//! Archives as streams: gzip or plain, told apart by their first bytes, within limits.

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;
use sha2::{Digest, Sha256};
use torpor_lifecycle::store::StoreError;

use super::limits::Limits;
use super::tree::unreadable;

/// Compressed formats that are recognised, to be refused by name.
const OTHERS: [(&[u8], &str); 3] = [
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz"),
    (b"BZh", "bzip2"),
];
/// Bytes that tell the format.
const PEEK: usize = 6;

/// The archive in a stream that may be compressed.
pub fn plain<'a>(
    mut input: impl Read + 'a,
    limits: &Limits,
) -> Result<Box<dyn Read + 'a>, StoreError> {
    let mut head = Vec::with_capacity(PEEK);
    input.by_ref().take(PEEK as u64).read_to_end(&mut head).map_err(unreadable)?;
    if let Some((_, name)) = OTHERS.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Err(StoreError::Invalid(format!(
            "the archive is compressed with {name}, which is not supported: use gzip or none"
        )));
    }
    let gzip = head.starts_with(&[0x1f, 0x8b]);
    let whole = io::Cursor::new(head).chain(input);
    if !gzip {
        return Ok(Box::new(Bounded { input: whole, read: 0, limit: limits.bytes }));
    }
    let inflated = Inflated {
        decoder: MultiGzDecoder::new(Counted { input: whole, read: 0 }),
        made: 0,
        ratio: limits.ratio,
    };
    Ok(Box::new(Bounded { input: inflated, read: 0, limit: limits.bytes }))
}

struct Counted<R> {
    input: R,
    read: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.read += count as u64;
        Ok(count)
    }
}

/// Stops when there is more than an image may have.
struct Bounded<R> {
    input: R,
    read: u64,
    limit: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.read += count as u64;
        if self.read > self.limit {
            let limit = self.limit;
            return Err(io::Error::other(format!("it has more than {limit} bytes")));
        }
        Ok(count)
    }
}

/// Stops when it becomes clear that a small file is meant to fill a disk.
struct Inflated<R: Read> {
    decoder: MultiGzDecoder<Counted<R>>,
    made: u64,
    ratio: u64,
}

impl<R: Read> Read for Inflated<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.decoder.read(buffer)?;
        self.made += count as u64;
        let read = self.decoder.get_ref().read;
        if self.made > Limits::RATIO_FLOOR && self.made > read.saturating_mul(self.ratio) {
            let ratio = self.ratio;
            return Err(io::Error::other(format!("it grows more than {ratio} times unpacked")));
        }
        Ok(count)
    }
}

/// Hashes what passes through.
pub(crate) struct Hashed<R> {
    input: R,
    hasher: Sha256,
}

impl<R: Read> Hashed<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, hasher: Sha256::new() }
    }

    /// Reads to the end and compares with `sha256:…`.
    pub(crate) fn expect(mut self, digest: &str, what: &str) -> Result<(), StoreError> {
        io::copy(&mut self, &mut io::sink()).map_err(unreadable)?;
        let found = hex::encode(self.hasher.finalize());
        if digest.strip_prefix("sha256:") == Some(found.as_str()) {
            return Ok(());
        }
        Err(StoreError::Invalid(format!("{what} is damaged: {digest} became sha256:{found}")))
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}
