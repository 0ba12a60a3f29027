//! As much of ELF as kernels and modules need: sections by name, notes, `.modinfo`.
//!
//! Only 64 bit, little endian, x86-64. Every offset and length is checked against the file; a table
//! is walked once.

/// Kinds of files, `e_type`.
pub(crate) const RELOCATABLE: u16 = 1;
pub(crate) const EXECUTABLE: u16 = 2;

const X86_64: u16 = 62;
const PROGRAM_NOTE: u32 = 4;
const PROGRAM_HEADER: u64 = 56;
const SECTION_HEADER: u64 = 64;
/// Kernels have some fifty sections, modules built with one section per function some thousands.
const HEADERS_MAX: u64 = 65_535;

/// A file whose header makes sense.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elf<'a> {
    bytes: &'a [u8],
    pub kind: u16,
}

impl<'a> Elf<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        if !bytes.starts_with(b"\x7fELF") {
            return Err("it is no ELF file".to_owned());
        }
        // 64 bit, little endian.
        if bytes.get(4..6) != Some(&[2, 1]) {
            return Err("it is not for 64 bit machines".to_owned());
        }
        let kind = number(bytes, 16, 2)?;
        if number(bytes, 18, 2)? != u64::from(X86_64) {
            return Err("it is not for x86-64".to_owned());
        }
        let kind = u16::try_from(kind).expect("two bytes were read");
        Ok(Self { bytes, kind })
    }

    /// What a section contains; None: there is no such section.
    pub(crate) fn section(&self, name: &str) -> Result<Option<&'a [u8]>, String> {
        let bytes = self.bytes;
        let (table, size, count) =
            (number(bytes, 40, 8)?, number(bytes, 58, 2)?, number(bytes, 60, 2)?);
        if count == 0 {
            return Ok(None);
        }
        let table = Table::new(bytes, table, size, count, SECTION_HEADER)?;
        let names = table.entry(number(bytes, 62, 2)?)?;
        let names = part(bytes, number(names, 24, 8)?, number(names, 32, 8)?)?;
        for at in 0..count {
            let section = table.entry(at)?;
            let offset = usize::try_from(number(section, 0, 4)?).expect("32 bits fit");
            let called = names.get(offset..).ok_or("a section's name is outside of the file")?;
            if called.split(|byte| *byte == 0).next() == Some(name.as_bytes()) {
                return part(bytes, number(section, 24, 8)?, number(section, 32, 8)?).map(Some);
            }
        }
        Ok(None)
    }

    /// Whether there is a note of this owner and kind where a loader looks for it.
    pub(crate) fn has_note(&self, owner: &str, kind: u32) -> Result<bool, String> {
        let bytes = self.bytes;
        let (table, size, count) =
            (number(bytes, 32, 8)?, number(bytes, 54, 2)?, number(bytes, 56, 2)?);
        if count == 0 {
            return Ok(false);
        }
        let table = Table::new(bytes, table, size, count, PROGRAM_HEADER)?;
        for at in 0..count {
            let segment = table.entry(at)?;
            if number(segment, 0, 4)? != u64::from(PROGRAM_NOTE) {
                continue;
            }
            let notes = part(bytes, number(segment, 8, 8)?, number(segment, 32, 8)?)?;
            if find_note(notes, owner, kind)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// `key=value` pairs that a module says of itself.
    pub(crate) fn module_information(&self) -> Result<Vec<(&'a str, &'a str)>, String> {
        let section = self.section(".modinfo")?.ok_or("it has no .modinfo")?;
        let texts = section.split(|byte| *byte == 0).filter(|text| !text.is_empty());
        let mut pairs = Vec::new();
        for text in texts {
            // A parameter's description may be in any encoding; none of those is asked for.
            let Ok(text) = std::str::from_utf8(text) else { continue };
            pairs.extend(text.split_once('='));
        }
        Ok(pairs)
    }
}

/// Headers of equal size, all of them within the file.
struct Table<'a> {
    bytes: &'a [u8],
    size: u64,
}

impl<'a> Table<'a> {
    fn new(all: &'a [u8], at: u64, size: u64, count: u64, least: u64) -> Result<Self, String> {
        if size < least || count > HEADERS_MAX {
            return Err("its table of headers makes no sense".to_owned());
        }
        Ok(Self { bytes: part(all, at, size * count)?, size })
    }

    fn entry(&self, at: u64) -> Result<&'a [u8], String> {
        part(self.bytes, self.size * at, self.size)
    }
}

fn find_note(mut notes: &[u8], owner: &str, kind: u32) -> Result<bool, String> {
    while notes.len() >= 12 {
        let (owner_length, length) = (number(notes, 0, 4)?, number(notes, 4, 4)?);
        let found = number(notes, 8, 4)? == u64::from(kind);
        let called = part(notes, 12, owner_length)?;
        if found && called.strip_suffix(b"\0") == Some(owner.as_bytes()) {
            return Ok(true);
        }
        // Both parts are padded to four bytes; 32 bit lengths can't overflow here.
        let next = 12 + owner_length.next_multiple_of(4) + length.next_multiple_of(4);
        notes = notes.get(usize::try_from(next).unwrap_or(usize::MAX)..).unwrap_or_default();
    }
    Ok(false)
}

/// A part of the file that is really there.
fn part(bytes: &[u8], at: u64, length: u64) -> Result<&[u8], String> {
    let end = at.checked_add(length).and_then(|end| usize::try_from(end).ok());
    let begin = usize::try_from(at).ok();
    begin
        .zip(end)
        .and_then(|(begin, end)| bytes.get(begin..end))
        .ok_or_else(|| "it points outside of itself".to_owned())
}

/// Up to eight bytes, the lowest first.
fn number(bytes: &[u8], at: u64, length: u64) -> Result<u64, String> {
    let bytes = part(bytes, at, length).map_err(|_| "it ends within a header")?;
    Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge;

    #[test]
    fn what_a_module_says_of_itself_is_read() {
        let module = forge::module("6.1.0-x", &["virtio", "virtio_ring"]);
        let elf = Elf::parse(&module).unwrap();
        assert_eq!(elf.kind, RELOCATABLE);
        let pairs = elf.module_information().unwrap();
        assert!(pairs.contains(&("depends", "virtio,virtio_ring")), "{pairs:?}");
        assert!(elf.section(".nowhere").unwrap().is_none());
    }

    #[test]
    fn the_note_is_found_by_owner_and_kind() {
        let kernel = forge::vmlinux("6.1.0-x");
        let elf = Elf::parse(&kernel).unwrap();
        assert!(elf.has_note("Xen", 18).unwrap());
        assert!(!elf.has_note("Xen", 17).unwrap());
        assert!(!elf.has_note("Xe", 18).unwrap());
    }

    #[test]
    fn no_cut_and_no_flipped_byte_gets_outside_of_the_file() {
        for file in [forge::module("6.1.0-x", &["virtio"]), forge::vmlinux("6.1.0-x")] {
            let walk = |bytes: &[u8]| {
                let elf = Elf::parse(bytes)?;
                let _ = elf.has_note("Xen", 18)?;
                elf.module_information().map(|_| ())
            };
            for length in 0..file.len() {
                let _ = walk(&file[..length]);
            }
            for at in 0..file.len() {
                for value in [0x00, 0x01, 0x7f, 0xff] {
                    let mut bent = file.clone();
                    bent[at] = value;
                    let _ = walk(&bent);
                }
            }
        }
    }

    #[test]
    fn absurd_lengths_are_refused() {
        let mut module = forge::module("6.1.0-x", &[]);
        // Where the table of sections begins.
        module[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        let error = Elf::parse(&module).unwrap().module_information().unwrap_err();
        assert_eq!(error, "it points outside of itself");
    }

    #[test]
    fn other_machines_are_refused() {
        let mut module = forge::module("6.1.0-x", &[]);
        module[18] = 183; // arm64
        assert_eq!(Elf::parse(&module).unwrap_err(), "it is not for x86-64");
    }
}
