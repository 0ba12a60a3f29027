//! The 512-byte blocks that describe the entries of a tar.
//!
//! Written as GNU tar does (long names in records of their own, large numbers in binary), because
//! names are bytes there and need be no text; files with holes as it does in POSIX archives. Read:
//! those, and POSIX archives with their extended records.

/// Everything in a tar is a multiple of this.
pub(super) const BLOCK: usize = 512;
const NAME: usize = 100;
/// `name` of a record that holds the name of the next entry.
const LONG: &[u8] = b"././@LongLink";
/// Whose headers these are. Only in POSIX archives programs look for holes in this form.
const GNU: &[u8; 8] = b"ustar  \0";
const POSIX: &[u8; 8] = b"ustar\x0000";
/// Name of a file with holes for those who do not know how to read it.
const SPARSE: &[u8] = b"GNUSparseFile.0";

/// What an entry is, by the letter in its header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Kind {
    #[default]
    File,
    HardLink,
    Symlink,
    Directory,
    Fifo,
    CharacterDevice,
    BlockDevice,
    /// Labels and the like: not unpacked, but their content is skipped.
    Skipped,
    /// Content in pieces, in an older format of GNU tar's own.
    Sparse,
    /// Records that describe the next entry: its long name, its long link target, its attributes.
    LongName,
    LongTarget,
    Attributes,
}

/// One entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) name: Vec<u8>,
    pub(super) target: Vec<u8>,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Of the content in the archive.
    pub(super) size: u64,
    /// Of a file with holes: its own size. The content begins with a map.
    pub(super) whole: Option<u64>,
    /// Seconds and nanoseconds since 1970.
    pub(super) modified: (i64, u32),
    /// Major and minor number.
    pub(super) device: (u32, u32),
    /// The name means what it says, also in a layer: a guest called a file so; see [`LITERAL`].
    pub(super) literal: bool,
}

/// The attribute that the daemon gives to files that a guest called `.wh.NAME`.
const LITERAL: &[u8] = b"TORPOR.literal";

/// Bytes after the content, up to the next block.
pub(super) fn padding(size: u64) -> usize {
    let over = usize::try_from(size % BLOCK as u64).expect("less than a block");
    (BLOCK - over) % BLOCK
}

// === Writing ===

impl Header {
    /// Appends the blocks that come before the content.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        if let Some(whole) = self.whole {
            return self.write_sparse(whole, out);
        }
        if self.name.len() > NAME {
            write_long(b'L', &self.name, out);
        }
        if self.target.len() > NAME {
            write_long(b'K', &self.target, out);
        }
        let letter = match self.kind {
            Kind::File => b'0',
            Kind::HardLink => b'1',
            Kind::Symlink => b'2',
            Kind::Directory => b'5',
            Kind::LongName => b'L',
            Kind::LongTarget => b'K',
            Kind::Fifo
            | Kind::CharacterDevice
            | Kind::BlockDevice
            | Kind::Skipped
            | Kind::Sparse
            | Kind::Attributes => {
                unreachable!("only read, never written")
            }
        };
        self.write_block(letter, GNU, out);
    }

    fn write_sparse(&self, whole: u64, out: &mut Vec<u8>) {
        let mut records = Vec::new();
        for (key, value) in [
            ("GNU.sparse.major", &b"1"[..]),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", &self.name),
            ("GNU.sparse.realsize", whole.to_string().as_bytes()),
        ] {
            write_record(key, value, &mut records);
        }
        let size = records.len() as u64;
        let about = Self { name: b"pax".to_vec(), size, whole: None, ..self.clone() };
        about.write_block(b'x', POSIX, out);
        out.extend_from_slice(&records);
        out.resize(out.len() + padding(size), 0);
        Self { name: SPARSE.to_vec(), ..self.clone() }.write_block(b'0', POSIX, out);
    }

    fn write_block(&self, letter: u8, magic: &[u8; 8], out: &mut Vec<u8>) {
        let mut block = [0; BLOCK];
        put_text(&mut block[..NAME], &self.name);
        put_number(&mut block[100..108], u64::from(self.mode));
        put_number(&mut block[108..116], u64::from(self.uid));
        put_number(&mut block[116..124], u64::from(self.gid));
        put_number(&mut block[124..136], self.size);
        put_number(&mut block[136..148], u64::try_from(self.modified.0).unwrap_or(0));
        block[156] = letter;
        put_text(&mut block[157..257], &self.target);
        block[257..265].copy_from_slice(magic);
        let sum = checksum(&block);
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.extend_from_slice(&block);
    }
}

fn write_long(letter: u8, text: &[u8], out: &mut Vec<u8>) {
    let size = text.len() as u64 + 1;
    let record = Header { name: LONG.to_vec(), mode: 0o644, size, ..Header::default() };
    record.write_block(letter, GNU, out);
    out.extend_from_slice(text);
    out.resize(out.len() + 1 + padding(size), 0);
}

/// `LENGTH KEY=VALUE\n`, where the length counts itself.
fn write_record(key: &str, value: &[u8], out: &mut Vec<u8>) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn put_text(field: &mut [u8], text: &[u8]) {
    let length = text.len().min(field.len());
    field[..length].copy_from_slice(&text[..length]);
}

/// Octal digits if they fit, else binary with the first bit set.
fn put_number(field: &mut [u8], number: u64) {
    let digits = field.len() - 1;
    if digits * 3 >= 64 || number < 1 << (digits * 3) {
        field[..digits].copy_from_slice(format!("{number:0digits$o}").as_bytes());
    } else {
        let start = field.len() - 8;
        field[start..].copy_from_slice(&number.to_be_bytes());
        field[0] |= 0x80;
    }
}

/// The sum of all bytes, its own field read as blanks.
fn checksum(block: &[u8; BLOCK]) -> u32 {
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    let own: u32 = block[148..156].iter().map(|byte| u32::from(*byte)).sum();
    sum - own + 8 * u32::from(b' ')
}

// === Reading ===

/// What a block is, or why it is none.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Block {
    Entry(Header),
    /// All zero: the archive is over.
    End,
}

impl Header {
    pub(super) fn read(block: &[u8; BLOCK]) -> Result<Block, &'static str> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(Block::End);
        }
        if get_number(&block[148..156]) != Some(u64::from(checksum(block))) {
            return Err("a header of the archive is damaged");
        }
        let number = |field: &[u8]| get_number(field).ok_or("a header of the archive is damaged");
        let small = |field: &[u8]| u32::try_from(number(field)?).map_err(|_| "a number is too big");
        let mut name = text(&block[..NAME]).to_vec();
        let prefix = text(&block[345..500]);
        // GNU uses the field of the prefix for something else.
        if &block[257..263] == b"ustar\0" && !prefix.is_empty() {
            name = [prefix, b"/", &name].concat();
        }
        let kind = kind_of(block[156], &name);
        let is_device = matches!(kind, Kind::CharacterDevice | Kind::BlockDevice);
        let has_content = !is_device
            && !matches!(kind, Kind::HardLink | Kind::Symlink | Kind::Directory | Kind::Fifo);
        let (major, minor) = (&block[329..337], &block[337..345]);
        Ok(Block::Entry(Self {
            kind,
            name,
            target: text(&block[157..257]).to_vec(),
            mode: small(&block[100..108])?,
            uid: small(&block[108..116])?,
            gid: small(&block[116..124])?,
            size: if has_content { number(&block[124..136])? } else { 0 },
            modified: (i64::try_from(number(&block[136..148])?).unwrap_or(0), 0),
            device: if is_device { (small(major)?, small(minor)?) } else { (0, 0) },
            ..Self::default()
        }))
    }

    /// Takes the attributes of an extended record, `length key=value` lines.
    pub(super) fn extend(&mut self, mut record: &[u8]) -> Result<(), &'static str> {
        const DAMAGED: &str = "an extended header of the archive is damaged";
        let mut true_name = None;
        while let Some(space) = record.iter().position(|byte| *byte == b' ') {
            let length: usize = parse(&record[..space]).ok_or(DAMAGED)?;
            let line = record.get(space + 1..length).ok_or(DAMAGED)?;
            let line = line.strip_suffix(b"\n").ok_or(DAMAGED)?;
            let equals = line.iter().position(|byte| *byte == b'=').ok_or(DAMAGED)?;
            let (key, value) = (&line[..equals], &line[equals + 1..]);
            if key == b"GNU.sparse.name" {
                true_name = Some(value.to_vec());
            } else {
                self.set(key, value).ok_or(DAMAGED)?;
            }
            record = &record[length..];
        }
        self.name = true_name.unwrap_or_else(|| std::mem::take(&mut self.name));
        if self.whole.is_some() && self.kind != Kind::File {
            self.kind = Kind::Sparse;
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        match key {
            b"path" => self.name = value.to_vec(),
            b"linkpath" => self.target = value.to_vec(),
            b"size" => self.size = parse(value)?,
            b"uid" => self.uid = parse(value)?,
            b"gid" => self.gid = parse(value)?,
            b"mtime" => self.modified = time(value)?,
            b"GNU.sparse.major" if value == b"1" => {}
            b"GNU.sparse.minor" if value == b"0" => {}
            b"GNU.sparse.realsize" => self.whole = Some(parse(value)?),
            LITERAL => self.literal = true,
            key if key.starts_with(b"GNU.sparse.") => self.kind = Kind::Sparse,
            _ => {}
        }
        Some(())
    }
}

fn kind_of(letter: u8, name: &[u8]) -> Kind {
    match letter {
        // The oldest archives tell directories by their name.
        b'0' | 0 if name.ends_with(b"/") => Kind::Directory,
        b'0' | b'7' | 0 => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' => Kind::CharacterDevice,
        b'4' => Kind::BlockDevice,
        b'6' => Kind::Fifo,
        b'5' => Kind::Directory,
        b'S' => Kind::Sparse,
        b'L' => Kind::LongName,
        b'K' => Kind::LongTarget,
        b'x' => Kind::Attributes,
        _ => Kind::Skipped,
    }
}

fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Octal digits between blanks, or binary with the first bit set; an empty field is 0.
fn get_number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        // Negative numbers have the second bit set too; no size or id is negative.
        if field[0] & 0x40 != 0 {
            return Some(0);
        }
        let first = u64::from(field[0] & 0x3f);
        let rest = field[1..].iter();
        return rest
            .map(|byte| u64::from(*byte))
            .try_fold(first, |number, byte| (number >> 56 == 0).then_some((number << 8) | byte));
    }
    let digits = std::str::from_utf8(text(field)).ok()?.trim();
    if digits.is_empty() { Some(0) } else { u64::from_str_radix(digits, 8).ok() }
}

fn parse<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// `seconds` or `seconds.fraction`.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    Some((seconds.parse().ok()?, digits.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &[u8], size: u64) -> Header {
        Header {
            kind: Kind::File,
            name: name.to_vec(),
            target: Vec::new(),
            mode: 0o4755,
            uid: 3_000_000,
            gid: 7,
            size,
            whole: None,
            modified: (1_700_000_000, 0),
            device: (0, 0),
            literal: false,
        }
    }

    #[test]
    fn a_header_survives_the_block() {
        for size in [0, 1, 8_589_934_591, 8_589_934_592, 1 << 50] {
            let mut out = Vec::new();
            header(b"a/\xff", size).write(&mut out);
            let block: [u8; BLOCK] = out.try_into().unwrap();
            assert_eq!(Header::read(&block), Ok(Block::Entry(header(b"a/\xff", size))));
        }
    }

    #[test]
    fn a_changed_byte_is_noticed() {
        let mut out = Vec::new();
        header(b"a", 5).write(&mut out);
        let mut block: [u8; BLOCK] = out.try_into().unwrap();
        block[3] ^= 1;
        assert!(Header::read(&block).is_err());
        assert_eq!(Header::read(&[0; BLOCK]), Ok(Block::End));
    }

    #[test]
    fn extended_attributes_take_precedence() {
        let mut entry = header(b"short", 1);
        entry.extend(b"19 path=a long path\n12 size=1234\n20 mtime=12.5000001\n").unwrap_err();
        let mut entry = header(b"short", 1);
        entry.extend(b"20 path=a long path\n13 size=1234\n18 mtime=12.50001\n").unwrap();
        assert_eq!((entry.name.as_slice(), entry.size), (&b"a long path"[..], 1234));
        assert_eq!(entry.modified, (12, 500_010_000));
        assert!(!entry.literal);
        entry.extend(b"20 TORPOR.literal=1\n").unwrap();
        assert!(entry.literal);
        for bad in [&b"99999999999999999999 x=y\n"[..], b"3 x", b"-1 a=b\n", b"2 \n"] {
            assert!(entry.extend(bad).is_err(), "{bad:?}");
        }
    }
}
