//! What is of use in a Debian package of a kernel.
//!
//! Nothing is extracted to disk and nothing is run: the kernel and its modules are picked out by
//! their place, and their base names are all that is believed.

use std::io::Read;
use std::path::{Component, Path};

use crate::ar;
use crate::image::VMLINUX_MAX;
use crate::modules::{Stored, Supply, built_in, name_of};
use crate::unpack;

/// A cloud kernel's package unpacks to 34 MB (compressed modules) or 110 MB (Debian 12's own).
const DATA_MAX: u64 = 1 << 30;
/// Files in it: 1414, and 4800 in the one for all hardware.
const ENTRIES_MAX: usize = 50_000;
/// Lists of names and the configuration: 300 kB together.
const TEXT_MAX: u64 = 8 << 20;

/// The parts of a kernel, as they are in the package.
#[derive(Debug)]
pub(crate) struct Contents {
    pub release: String,
    pub image: Vec<u8>,
    pub supply: Supply,
}

/// What an entry of the package is to us.
#[derive(Debug, PartialEq, Eq)]
enum Part<'a> {
    Image { release: &'a str },
    Configuration,
    BuiltIn,
    Module { name: String },
    Nothing,
}

/// Picks out what a machine needs.
pub(crate) fn read(package: &[u8]) -> Result<Contents, String> {
    let members = ar::members(package)?;
    let version = members.first().filter(|member| member.name == "debian-binary");
    if !version.is_some_and(|version| version.data.starts_with(b"2.")) {
        return Err("it is no Debian package".to_owned());
    }
    let data = members.iter().find(|member| member.name.starts_with("data.tar"));
    let data = data.ok_or("there is nothing in it")?.data;
    let unpacked = unpack::stream(data, DATA_MAX).map_err(|error| error.to_string())?;
    let mut sorted = Sorted::default();
    let mut archive = tar::Archive::new(unpacked);
    let entries = archive.entries().map_err(|error| error.to_string())?;
    for (at, entry) in entries.enumerate() {
        if at == ENTRIES_MAX {
            return Err("it has too many files".to_owned());
        }
        let entry = entry.map_err(|error| format!("it can't be unpacked: {error}"))?;
        sorted.take(entry)?;
    }
    sorted.contents()
}

#[derive(Default)]
struct Sorted {
    image: Option<(String, Vec<u8>)>,
    supply: Supply,
}

impl Sorted {
    fn take(&mut self, entry: tar::Entry<'_, impl Read>) -> Result<(), String> {
        let path = entry.path().map_err(|error| error.to_string())?.into_owned();
        let path = inside(&path)?;
        // Whatever stands for another file or a device is nothing that we need.
        if !entry.header().entry_type().is_file() {
            return Ok(());
        }
        match part(&path) {
            Part::Image { release } => {
                let image = bytes(entry, VMLINUX_MAX)?;
                if self.image.replace((release.to_owned(), image)).is_some() {
                    return Err("there are two kernels in it".to_owned());
                }
            }
            Part::Configuration => {
                let text = bytes(entry, TEXT_MAX)?;
                let forced = b"CONFIG_MODULE_SIG_FORCE=y".as_slice();
                self.supply.unsigned_load = !text.split(|byte| *byte == b'\n').any(|l| l == forced);
            }
            Part::BuiltIn => {
                let text = bytes(entry, TEXT_MAX)?;
                self.supply.built_in = Some(built_in(&String::from_utf8_lossy(&text)));
            }
            Part::Module { name } => {
                // All of them together are within DATA_MAX.
                let module = Stored::Bytes(bytes(entry, DATA_MAX)?);
                self.supply.modules.insert(name, module);
            }
            Part::Nothing => (),
        }
        Ok(())
    }

    fn contents(self) -> Result<Contents, String> {
        let (release, image) = self.image.ok_or("there is no kernel in it")?;
        Ok(Contents { release, image, supply: self.supply })
    }
}

/// The path in the package, as `lib/modules/…`; one that leads out of it is refused.
fn inside(path: &Path) -> Result<String, String> {
    let mut parts = Vec::new();
    for component in path.components() {
        match component {
            Component::CurDir => (),
            Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
            Component::RootDir | Component::ParentDir | Component::Prefix(_) => {
                return Err(format!("a path leads out of it: {}", path.display()));
            }
        }
    }
    Ok(parts.join("/"))
}

fn part(path: &str) -> Part<'_> {
    if let Some(release) = path.strip_prefix("boot/vmlinuz-") {
        return Part::Image { release };
    }
    if path.starts_with("boot/config-") {
        return Part::Configuration;
    }
    // Debian 13 has moved them.
    let path = path.strip_prefix("usr/").unwrap_or(path);
    let Some(path) = path.strip_prefix("lib/modules/") else { return Part::Nothing };
    let Some((_, path)) = path.split_once('/') else { return Part::Nothing };
    match path.rsplit('/').next() {
        Some("modules.builtin") if !path.contains('/') => Part::BuiltIn,
        Some(file) => name_of(file).map_or(Part::Nothing, |name| Part::Module { name }),
        None => Part::Nothing,
    }
}

fn bytes(entry: tar::Entry<'_, impl Read>, limit: u64) -> Result<Vec<u8>, String> {
    if entry.size() > limit {
        return Err("a file in it is larger than anything expected".to_owned());
    }
    let mut bytes = Vec::new();
    let mut entry = entry.take(limit);
    entry.read_to_end(&mut bytes).map_err(|error| format!("it can't be unpacked: {error}"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge;

    const RELEASE: &str = "6.1.0-x";

    fn why(files: &[(&str, &[u8])]) -> String {
        read(&forge::package(files)).unwrap_err()
    }

    #[test]
    fn kernel_modules_and_what_is_built_in_are_picked_out() {
        for lib in ["./lib", "./usr/lib"] {
            let path = |name: &str| format!("{lib}/modules/{RELEASE}/{name}");
            let contents = read(&forge::package(&[
                ("./boot/vmlinuz-6.1.0-x", b"image"),
                ("./boot/config-6.1.0-x", b"# CONFIG_MODULE_SIG_FORCE is not set\n"),
                (&path("kernel/net/net-failover.ko.xz"), b"module"),
                (&path("modules.builtin"), b"kernel/fs/ext4/ext4.ko\n"),
                (&path("kernel/modules.builtin"), b"kernel/fs/erofs/erofs.ko\n"),
                ("./usr/share/doc/overlay.ko", b"not one"),
            ]));
            let contents = contents.unwrap();
            assert_eq!((contents.release.as_str(), &contents.image[..]), (RELEASE, &b"image"[..]));
            let names: Vec<_> = contents.supply.modules.keys().collect();
            assert_eq!(names, ["net_failover"]);
            let built_in = contents.supply.built_in.unwrap();
            assert_eq!(built_in.into_iter().collect::<Vec<_>>(), ["ext4"]);
            assert!(contents.supply.unsigned_load);
        }
    }

    #[test]
    fn a_kernel_that_wants_signatures_keeps_them() {
        let image = ("./boot/vmlinuz-6.1.0-x", &b"image"[..]);
        let forced = ("./boot/config-6.1.0-x", &b"A=y\nCONFIG_MODULE_SIG_FORCE=y\n"[..]);
        assert!(!read(&forge::package(&[image, forced])).unwrap().supply.unsigned_load);
        assert!(!read(&forge::package(&[image])).unwrap().supply.unsigned_load);
    }

    #[test]
    fn a_path_that_leads_out_is_refused() {
        for path in ["../etc/passwd", "./boot/../../etc/passwd", "/etc/passwd"] {
            assert!(why(&[(path, b"x")]).contains("leads out"), "{path}");
        }
    }

    #[test]
    fn links_and_devices_are_nothing_to_us() {
        let mut archive = tar::Builder::new(Vec::new());
        for kind in [tar::EntryType::Symlink, tar::EntryType::Link, tar::EntryType::Char] {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(0);
            header.set_link_name("/etc/shadow").unwrap();
            header.set_path("boot/vmlinuz-6.1.0-x").unwrap();
            header.set_cksum();
            archive.append(&header, &[][..]).unwrap();
        }
        let data = archive.into_inner().unwrap();
        let package = forge::ar(&[("debian-binary", b"2.0\n"), ("data.tar", &data)]);
        assert_eq!(read(&package).unwrap_err(), "there is no kernel in it");
    }

    #[test]
    fn what_is_no_package_of_one_kernel_is_refused() {
        assert_eq!(read(b"PK\x03\x04").unwrap_err(), "it is no ar archive");
        let text = forge::ar(&[("hello", b"world")]);
        assert_eq!(read(&text).unwrap_err(), "it is no Debian package");
        let empty = forge::ar(&[("debian-binary", b"2.0\n")]);
        assert_eq!(read(&empty).unwrap_err(), "there is nothing in it");
        let two: [(&str, &[u8]); 2] = [("boot/vmlinuz-1", b"1"), ("boot/vmlinuz-2", b"2")];
        assert_eq!(why(&two), "there are two kernels in it");
    }

    #[test]
    fn a_package_that_ends_early_is_refused() {
        let data = forge::xz(&forge::tar(&[("boot/vmlinuz-6.1.0-x", &[7; 100_000])]));
        let cut =
            forge::ar(&[("debian-binary", b"2.0\n"), ("data.tar.xz", &data[..data.len() / 2])]);
        assert!(read(&cut).unwrap_err().contains("can't be unpacked"));
    }

    #[test]
    fn a_file_that_claims_to_be_enormous_is_refused_before_it_is_read() {
        let mut header = tar::Header::new_gnu();
        header.set_path("boot/vmlinuz-6.1.0-x").unwrap();
        header.set_size(u64::MAX / 4);
        header.set_cksum();
        let data = [header.as_bytes().as_slice(), &[0; 4096]].concat();
        let package = forge::ar(&[("debian-binary", b"2.0\n"), ("data.tar", &data)]);
        assert!(read(&package).unwrap_err().contains("larger than anything expected"));
    }

    #[test]
    fn files_without_end_are_refused() {
        let mut header = tar::Header::new_gnu();
        header.set_path("x").unwrap();
        header.set_size(0);
        header.set_cksum();
        let data = forge::gzip(&header.as_bytes().repeat(ENTRIES_MAX + 1));
        let package = forge::ar(&[("debian-binary", b"2.0\n"), ("data.tar.gz", &data)]);
        assert_eq!(read(&package).unwrap_err(), "it has too many files");
    }
}
