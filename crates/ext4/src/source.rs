//! Where the bytes of a disk come from.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A disk.
pub trait ReadAt {
    /// Fills `buffer` from `offset`; what lies behind the end is an error.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// How many bytes there are. Its filesystem may claim more, and is believed no more than this.
    fn size(&self) -> io::Result<u64>;
}

/// A regular file: the size of a device is not in its metadata.
impl ReadAt for File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

impl ReadAt for [u8] {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let here = |start: usize| self.get(start..start.checked_add(buffer.len())?);
        let bytes = usize::try_from(offset).ok().and_then(here);
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
}

impl ReadAt for Vec<u8> {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.as_slice().read_exact_at(buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.as_slice().size()
    }
}

impl<D: ReadAt + ?Sized> ReadAt for &D {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_exact_at(buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        (**self).size()
    }
}
