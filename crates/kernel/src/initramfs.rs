//! What a machine boots from, as a cpio archive in the kernel's `newc` format.
//!
//! ```text
//!   "070701"  { inode mode owner group links time size  major minor  node's major minor
//!               length of the name  0 }  each 8 hexadecimal digits
//!   name NUL, to a multiple of 4 | data, to a multiple of 4 | … | TRAILER!!!
//! ```
//!
//! The same kernel and the same first program give the same bytes.

use std::path::Path;

use crate::{Kernel, KernelError, failed};

/// Where the first program finds or mounts something.
const DIRECTORIES: [&str; 7] = ["dev", "proc", "sys", "root", "disk", "newroot", "modules"];
const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const DEVICE: u32 = 0o020_600;
/// `/dev/console`, the standard output of the first program; without it that one has none.
const CONSOLE: (u32, u32) = (5, 1);
/// What boot loaders pad to; the kernel skips zeros.
const BLOCK: usize = 512;

/// What a machine boots from: `init` as /init, the kernel's modules as /modules/NN-name.ko.
pub fn initramfs(kernel: &Kernel, init: &[u8]) -> Result<Vec<u8>, KernelError> {
    let mut archive = Archive { bytes: Vec::new(), entries: 0 };
    for directory in DIRECTORIES {
        archive.add(directory, DIRECTORY, (0, 0), &[])?;
    }
    archive.add("dev/console", DEVICE, CONSOLE, &[])?;
    archive.add("init", PROGRAM, (0, 0), init)?;
    for path in &kernel.modules {
        let module = std::fs::read(path).map_err(failed(format!("read {}", path.display())))?;
        archive.add(&format!("modules/{}", file_name(path)), FILE, (0, 0), &module)?;
    }
    archive.end()
}

fn file_name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(
        &mut self,
        name: &str,
        mode: u32,
        (major, minor): (u32, u32),
        data: &[u8],
    ) -> Result<(), KernelError> {
        self.entries += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        self.header(self.entries, mode, links, (major, minor), name, data)
    }

    fn header(
        &mut self,
        inode: u32,
        mode: u32,
        links: u32,
        (major, minor): (u32, u32),
        name: &str,
        data: &[u8],
    ) -> Result<(), KernelError> {
        let too_large = || failed(format!("put {name} into what a machine boots from"));
        let size = u32::try_from(data.len()).map_err(too_large())?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_large())?;
        self.bytes.extend(b"070701");
        for field in [inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0] {
            self.bytes.extend(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad(4);
        self.bytes.extend(data);
        self.pad(4);
        Ok(())
    }

    fn pad(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }

    fn end(mut self) -> Result<Vec<u8>, KernelError> {
        self.header(0, 0, 1, (0, 0), "TRAILER!!!", &[])?;
        self.pad(BLOCK);
        Ok(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Entry {
        name: String,
        mode: u32,
        device: (u32, u32),
        data: Vec<u8>,
    }

    /// Everything in an archive, as the kernel reads it.
    fn entries(mut archive: &[u8]) -> Vec<Entry> {
        let mut entries = Vec::new();
        loop {
            let field = |at: usize| {
                let text = std::str::from_utf8(&archive[6 + 8 * at..14 + 8 * at]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            assert_eq!(&archive[..6], b"070701");
            let (size, name_size) = (field(6) as usize, field(11) as usize);
            let name = String::from_utf8(archive[110..110 + name_size - 1].to_vec()).unwrap();
            let at = (110 + name_size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert!(archive[at..].iter().all(|byte| *byte == 0));
                return entries;
            }
            let data = archive[at..at + size].to_vec();
            entries.push(Entry { name, mode: field(1), device: (field(9), field(10)), data });
            archive = &archive[(at + size).next_multiple_of(4)..];
        }
    }

    fn kernel(dir: &Path) -> Kernel {
        let modules = [("00-a.ko", &b"first"[..]), ("01-b.ko", b"second")].map(|(name, bytes)| {
            std::fs::write(dir.join(name), bytes).unwrap();
            dir.join(name)
        });
        let (release, id) = ("6.1.0-x".to_owned(), "id".to_owned());
        Kernel { release, id, vmlinux: dir.join("vmlinux"), modules: modules.into() }
    }

    #[test]
    fn a_machine_finds_its_first_program_modules_and_console() {
        let dir = tempfile::tempdir().unwrap();
        let archive = initramfs(&kernel(dir.path()), b"program").unwrap();
        assert_eq!(archive.len() % BLOCK, 0);
        let entries = entries(&archive);
        let find = |name: &str| entries.iter().find(|entry| entry.name == name).unwrap();
        assert_eq!(find("init").mode, 0o100_755);
        assert_eq!(find("init").data, b"program");
        assert_eq!(find("modules/00-a.ko").data, b"first");
        assert_eq!(find("modules/01-b.ko").data, b"second");
        assert_eq!((find("dev/console").mode, find("dev/console").device), (0o020_600, (5, 1)));
        for directory in ["dev", "proc", "sys", "root", "disk", "newroot", "modules"] {
            assert_eq!(find(directory).mode, 0o040_755, "{directory}");
        }
        // A file whose directory comes later is dropped by the kernel.
        let at = |name: &str| entries.iter().position(|entry| entry.name == name).unwrap();
        assert!(at("dev") < at("dev/console") && at("modules") < at("modules/00-a.ko"));
    }

    #[test]
    fn the_same_kernel_and_program_give_the_same_bytes() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = initramfs(&kernel(one.path()), b"program").unwrap();
        assert_eq!(first, initramfs(&kernel(other.path()), b"program").unwrap());
        assert_ne!(first, initramfs(&kernel(other.path()), b"Program").unwrap());
    }

    #[test]
    fn a_module_that_is_gone_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = kernel(dir.path());
        std::fs::remove_file(&kernel.modules[1]).unwrap();
        assert!(initramfs(&kernel, b"x").unwrap_err().to_string().contains("01-b.ko"));
    }
}
