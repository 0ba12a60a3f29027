//! Decompression with limits: by what the bytes say they are, never more than asked for.

use std::io::{self, Read};

/// How bytes are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Plain,
    Gzip,
    Xz,
    Zstd,
}

impl Packing {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        match bytes {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            [..] => Self::Plain,
        }
    }
}

/// What is in there, as it comes; reading past `limit` is an error, not an end.
pub(crate) fn stream(bytes: &[u8], limit: u64) -> io::Result<impl Read> {
    let inner: Box<dyn Read + '_> = match Packing::of(bytes) {
        Packing::Plain => Box::new(bytes),
        Packing::Gzip => Box::new(flate2::read::GzDecoder::new(bytes)),
        // One stream: the kernel appends its own length to it.
        Packing::Xz => Box::new(lzma_rust2::XzReader::new(bytes, false)),
        // Refuses windows above 100 MB by itself.
        Packing::Zstd => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(bytes);
            Box::new(decoder.map_err(io::Error::other)?)
        }
    };
    Ok(Limited { inner, left: limit })
}

/// All of it.
pub(crate) fn whole(bytes: &[u8], limit: u64) -> io::Result<Vec<u8>> {
    let mut unpacked = Vec::new();
    stream(bytes, limit)?.read_to_end(&mut unpacked)?;
    Ok(unpacked)
}

/// Unlike `take`, tells an end from a limit.
struct Limited<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than anything expected here")
        })?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge;

    #[test]
    fn every_packing_is_undone() {
        let text = b"what is packed comes out again, comes out again".repeat(100);
        let packed = [text.clone(), forge::gzip(&text), forge::xz(&text), forge::zstd(&text)];
        let kinds = [Packing::Plain, Packing::Gzip, Packing::Xz, Packing::Zstd];
        for (packed, kind) in packed.iter().zip(kinds) {
            assert_eq!(Packing::of(packed), kind);
            assert_eq!(whole(packed, text.len() as u64).unwrap(), text, "{kind:?}");
        }
    }

    #[test]
    fn a_bomb_ends_at_the_limit() {
        let zeros = vec![0; 8 << 20];
        for packed in [forge::gzip(&zeros), forge::xz(&zeros), forge::zstd(&zeros)] {
            assert!(packed.len() < 64 << 10, "{}", packed.len());
            let error = whole(&packed, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge, "{:?}", Packing::of(&packed));
        }
    }

    #[test]
    fn what_ends_early_is_refused() {
        let text = b"some text".repeat(1000);
        for packed in [forge::gzip(&text), forge::xz(&text), forge::zstd(&text)] {
            let cut = &packed[..packed.len() / 2];
            assert!(whole(cut, 1 << 20).is_err(), "{:?}", Packing::of(&packed));
        }
    }
}
