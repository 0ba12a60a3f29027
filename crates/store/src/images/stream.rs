//! Archives as streams: gzip, zstd or plain, told apart by their first bytes, within limits.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use sha2::{Digest, Sha256};
use torpor_lifecycle::store::StoreError;

use super::limits::Limits;
use super::tree::unreadable;

/// Compressed formats that are recognised, to be refused by name.
const OTHERS: [(&[u8], &str); 2] = [(&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz"), (b"BZh", "bzip2")];
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// A frame, or one that is to be skipped and comes before others.
const ZSTD: [&[u8]; 2] = [&[0x28, 0xb5, 0x2f, 0xfd], &[0x50, 0x2a, 0x4d, 0x18]];
/// Read from a zstd stream at a time.
const BUFFER: usize = 128 * 1024;
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
            "the archive is compressed with {name}, which is not supported: use gzip, zstd or none"
        )));
    }
    let gzip = head.starts_with(&GZIP);
    let zstd = ZSTD.iter().any(|magic| head.starts_with(magic));
    let whole = io::Cursor::new(head).chain(input);
    if !gzip && !zstd {
        return Ok(Box::new(Bounded { input: whole, read: 0, limit: limits.bytes }));
    }
    let read = Rc::new(Cell::new(0));
    let counted = Counted { input: whole, read: read.clone() };
    let decoder: Box<dyn Read + 'a> = match gzip {
        true => Box::new(MultiGzDecoder::new(counted)),
        false => Box::new(Zstd::new(counted)),
    };
    let inflated = Inflated { decoder, read, made: 0, ratio: limits.ratio };
    Ok(Box::new(Bounded { input: inflated, read: 0, limit: limits.bytes }))
}

struct Counted<R> {
    input: R,
    read: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.read.set(self.read.get() + count as u64);
        Ok(count)
    }
}

/// All frames of a zstd stream, one after the other; what may be skipped is.
struct Zstd<R> {
    input: BufReader<R>,
    decoder: FrameDecoder,
}

impl<R: Read> Zstd<R> {
    fn new(input: R) -> Self {
        Self { input: BufReader::with_capacity(BUFFER, input), decoder: FrameDecoder::new() }
    }

    /// Begins the next frame; false at the end.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.input.fill_buf()?.is_empty() {
            let length = match self.decoder.init(&mut self.input) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => u64::from(length),
                Err(error) => return Err(io::Error::other(error)),
            };
            if io::copy(&mut (&mut self.input).take(length), &mut io::sink())? < length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(false)
    }
}

impl<R: Read> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            while !self.decoder.is_finished() && self.decoder.can_collect() < buffer.len() {
                let most = BlockDecodingStrategy::UptoBytes(buffer.len());
                self.decoder.decode_blocks(&mut self.input, most).map_err(io::Error::other)?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 || buffer.is_empty() || !self.begin()? {
                return Ok(count);
            }
        }
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
struct Inflated<D> {
    decoder: D,
    /// Compressed bytes.
    read: Rc<Cell<u64>>,
    made: u64,
    ratio: u64,
}

impl<D: Read> Read for Inflated<D> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.decoder.read(buffer)?;
        self.made += count as u64;
        let most = self.read.get().saturating_mul(self.ratio);
        if self.made > Limits::RATIO_FLOOR && self.made > most {
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
