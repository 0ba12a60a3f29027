//! Archives that no honest program writes, byte by byte.

/// Kinds of entries.
pub(super) const FILE: u8 = b'0';
pub(super) const HARD_LINK: u8 = b'1';
pub(super) const LINK: u8 = b'2';
pub(super) const CHAR_DEVICE: u8 = b'3';
pub(super) const DIRECTORY: u8 = b'5';
pub(super) const PAX: u8 = b'x';
pub(super) const LONG_NAME: u8 = b'L';

/// An archive under construction.
#[derive(Default)]
pub(super) struct Tar(Vec<u8>);

impl Tar {
    /// An entry as it is told: names, links and sizes may lie.
    pub(super) fn entry(self, kind: u8, name: &str, link: &str, content: &[u8]) -> Self {
        let size = format!("{:011o}", content.len());
        self.claiming(kind, name, link, &size, content)
    }

    /// One whose header says another size than what follows.
    pub(super) fn claiming(
        mut self,
        kind: u8,
        name: &str,
        link: &str,
        size: &str,
        content: &[u8],
    ) -> Self {
        let mut header = [0; 512];
        let mut put = |at: usize, text: &str| {
            let text = text.as_bytes();
            header[at..at + text.len()].copy_from_slice(text);
        };
        put(0, &name[..name.len().min(100)]);
        put(100, "0006755\0");
        put(108, "0000000\0");
        put(116, "0000000\0");
        put(124, size);
        put(136, "00000000000\0");
        put(148, "        ");
        put(157, &link[..link.len().min(100)]);
        put(257, "ustar\x0000");
        put(329, "0000012\0");
        put(337, "0000313\0");
        header[156] = kind;
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(super) fn file(self, name: &str, content: &[u8]) -> Self {
        self.entry(FILE, name, "", content)
    }

    pub(super) fn link(self, name: &str, to: &str) -> Self {
        self.entry(LINK, name, to, b"")
    }

    pub(super) fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }

    /// Without an end.
    pub(super) fn torn(self) -> Vec<u8> {
        self.0
    }
}
