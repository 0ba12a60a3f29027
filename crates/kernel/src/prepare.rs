//! From a package, or from the files of a kernel of one's own, to an installed kernel.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::image::{self, VMLINUX_MAX};
use crate::installed::{self, Draft};
use crate::modules::{self, Stored, Supply};
use crate::{Kernel, KernelError, failed, package, unfit};

/// Debian's package of all hardware has 100 MB.
const PACKAGE_MAX: u64 = 512 << 20;
/// Files and directories under a directory of modules: 6000 on a large system.
const ENTRIES_MAX: usize = 50_000;
/// The lists in it: 100 kB.
const TEXT_MAX: u64 = 8 << 20;

/// Takes a Debian package of a kernel apart and puts what machines need among the kernels. Blocks for
/// some seconds.
pub fn prepare_package(package: &Path, kernels: &Path) -> Result<Kernel, KernelError> {
    let bytes = read(package, PACKAGE_MAX)?;
    let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
    prepare_bytes(&bytes, name, None, kernels)
}

/// As [`prepare_package`], of a package that was read; with the hash by which it is known.
pub(crate) fn prepare_bytes(
    package: &[u8],
    name: String,
    sha256: Option<String>,
    kernels: &Path,
) -> Result<Kernel, KernelError> {
    let contents = package::read(package).map_err(|why| unfit(name.as_str(), why))?;
    let refused = |why| unfit(format!("the kernel in {name}"), why);
    let vmlinux = image::vmlinux(contents.image).map_err(refused)?;
    let release = image::check(&vmlinux).map_err(refused)?;
    if release != contents.release {
        return Err(refused(format!("it calls itself {release}, not {}", contents.release)));
    }
    let modules = modules::choose(&contents.supply, &release)?;
    installed::put(kernels, Draft { release, source: name, sha256, vmlinux, modules })
}

/// Puts a kernel of one's own among the kernels: an ELF file or a bzImage, and the directory of its
/// modules as it is installed (`/lib/modules/<release>`; empty: everything is built in). Signatures of
/// the modules stay, since nobody knows whether the kernel wants them. Blocks for some seconds.
pub fn prepare_files(
    vmlinux: &Path,
    modules: &Path,
    kernels: &Path,
) -> Result<Kernel, KernelError> {
    let shown = vmlinux.display().to_string();
    let refused = |why| unfit(shown.as_str(), why);
    let vmlinux = image::vmlinux(read(vmlinux, VMLINUX_MAX)?).map_err(refused)?;
    let release = image::check(&vmlinux).map_err(refused)?;
    let modules = modules::choose(&supply(modules)?, &release)?;
    installed::put(kernels, Draft { release, source: shown, sha256: None, vmlinux, modules })
}

/// Every module under a directory. Links are not followed: those to the sources lead far away.
fn supply(dir: &Path) -> Result<Supply, KernelError> {
    let mut supply = Supply::default();
    let list = dir.join("modules.builtin");
    if list.exists() {
        let text = read(&list, TEXT_MAX)?;
        supply.built_in = Some(modules::built_in(&String::from_utf8_lossy(&text)));
    }
    let mut seen = 0;
    let mut left = vec![dir.to_owned()];
    while let Some(dir) = left.pop() {
        let action = || format!("read the modules in {}", dir.display());
        for entry in std::fs::read_dir(&dir).map_err(failed(action()))? {
            let entry = entry.map_err(failed(action()))?;
            let kind = entry.file_type().map_err(failed(action()))?;
            seen += 1;
            if seen > ENTRIES_MAX {
                return Err(unfit(dir.display().to_string(), "there are too many files in it"));
            }
            if kind.is_dir() {
                left.push(entry.path());
            } else if let Some(name) = entry.file_name().to_str().and_then(modules::name_of)
                && kind.is_file()
            {
                supply.modules.insert(name, Stored::File(entry.path()));
            }
        }
    }
    // Whoever gives another directory would only learn from a guest that does not boot.
    if supply.built_in.is_none() && seen > 0 {
        let why = "it has no modules.builtin, so it is no directory of a kernel's modules";
        return Err(unfit(dir.display().to_string(), why));
    }
    Ok(supply)
}

pub(crate) fn read_package(path: &Path) -> Result<Vec<u8>, KernelError> {
    read(path, PACKAGE_MAX)
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, KernelError> {
    let action = format!("read {}", path.display());
    let mut bytes = Vec::new();
    let mut file = match File::open(path) {
        Ok(file) => file.take(limit + 1),
        Err(error) => return Err(failed(action)(error)),
    };
    file.read_to_end(&mut bytes).map_err(failed(action))?;
    if bytes.len() as u64 > limit {
        return Err(unfit(path.display().to_string(), "it is larger than anything expected"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::{forge, list, newest};

    const RELEASE: &str = "6.1.0-x";
    const BUILT_IN: &[u8] =
        b"virtio_mmio.ko\nvirtio_blk.ko\nvirtio_console.ko\next4.ko\noverlay.ko\n";

    fn package(release: &str, inner: &str) -> Vec<u8> {
        let path = |name: &str| format!("./lib/modules/{release}/{name}");
        forge::package(&[
            (&format!("./boot/vmlinuz-{release}"), &forge::vmlinuz(inner)),
            (&format!("./boot/config-{release}"), b""),
            (&path("modules.builtin"), BUILT_IN),
            (&path("kernel/virtio_net.ko.xz"), &forge::xz(&forge::module(release, &["failover"]))),
            (&path("kernel/failover.ko"), &forge::signed(&forge::module(release, &[]))),
            (&path("kernel/erofs.ko.zst"), &forge::zstd(&forge::module(release, &[]))),
        ])
    }

    fn file(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn a_package_becomes_a_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let package = file(dir.path(), "linux.deb", &package(RELEASE, RELEASE));
        let kernels = dir.path().join("data/kernels");
        let kernel = prepare_package(&package, &kernels).unwrap();
        assert_eq!(kernel.release, RELEASE);
        assert_eq!(std::fs::read(&kernel.vmlinux).unwrap(), forge::vmlinux(RELEASE));
        let names = kernel.modules.iter().map(|path| path.file_name().unwrap().to_str().unwrap());
        let names: Vec<_> = names.collect();
        assert_eq!(names, ["00-failover.ko", "01-virtio_net.ko", "02-erofs.ko"]);
        assert_eq!(std::fs::read(&kernel.modules[0]).unwrap(), forge::module(RELEASE, &[]));
        assert_eq!(newest(&kernels).unwrap(), kernel);
        assert_eq!(list(&kernels).unwrap()[0].source.as_deref(), Some("linux.deb"));
    }

    #[test]
    fn the_same_package_is_the_same_kernel_wherever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let package = file(dir.path(), "linux.deb", &package(RELEASE, RELEASE));
        let one = prepare_package(&package, &dir.path().join("one")).unwrap();
        let other = prepare_package(&package, &dir.path().join("other")).unwrap();
        assert_eq!(one.id, other.id);
    }

    #[test]
    fn a_kernel_under_a_wrong_name_is_refused_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let package = file(dir.path(), "linux.deb", &package(RELEASE, "6.1.0-y"));
        let kernels = dir.path().join("kernels");
        let error = prepare_package(&package, &kernels).unwrap_err().to_string();
        assert!(error.contains("it calls itself 6.1.0-y, not 6.1.0-x"), "{error}");
        assert!(!kernels.exists());
    }

    #[test]
    fn a_kernel_of_ones_own_is_taken_with_its_modules() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("modules");
        let erofs = forge::signed(&forge::module(RELEASE, &[]));
        file(&modules, "kernel/fs/erofs/erofs.ko.xz", &forge::xz(&erofs));
        file(&modules, "modules.builtin", &[BUILT_IN, b"virtio_net.ko\n"].concat());
        for (name, bytes) in [("elf", forge::vmlinux(RELEASE)), ("bz", forge::vmlinuz(RELEASE))] {
            let image = file(dir.path(), name, &bytes);
            let kernel = prepare_files(&image, &modules, &dir.path().join("kernels")).unwrap();
            assert_eq!(kernel.release, RELEASE);
            assert_eq!(std::fs::read(&kernel.vmlinux).unwrap(), forge::vmlinux(RELEASE));
            // Nobody knows whether this kernel can do without the signature.
            assert_eq!(std::fs::read(&kernel.modules[0]).unwrap(), erofs);
        }
    }

    #[test]
    fn links_among_modules_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("modules");
        file(&modules, "modules.builtin", b"");
        std::os::unix::fs::symlink(dir.path(), modules.join("build")).unwrap();
        let elsewhere = file(dir.path(), "erofs.ko", &forge::module(RELEASE, &[]));
        std::os::unix::fs::symlink(elsewhere, modules.join("erofs.ko")).unwrap();
        assert!(supply(&modules).unwrap().modules.is_empty());
    }

    #[test]
    fn modules_of_another_kernel_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("modules");
        file(&modules, "erofs.ko", &forge::module("5.10.0-z", &[]));
        file(&modules, "modules.builtin", &[BUILT_IN, b"virtio_net.ko\n"].concat());
        let image = file(dir.path(), "vmlinux", &forge::vmlinux(RELEASE));
        let error = prepare_files(&image, &modules, &dir.path().join("kernels")).unwrap_err();
        assert!(error.to_string().contains("made for the kernel 5.10.0-z"), "{error}");
    }

    #[test]
    fn a_directory_that_is_not_of_modules_is_refused_but_an_empty_one_is_fine() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("modules");
        std::fs::create_dir(&modules).unwrap();
        let image = file(dir.path(), "vmlinux", &forge::vmlinux(RELEASE));
        let kernel = prepare_files(&image, &modules, &dir.path().join("kernels")).unwrap();
        assert_eq!(kernel.modules, [] as [PathBuf; 0]);
        file(&modules, "README", b"hello");
        let error = prepare_files(&image, &modules, &dir.path().join("kernels")).unwrap_err();
        assert!(error.to_string().contains("no modules.builtin"), "{error}");
    }

    #[test]
    fn what_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = prepare_package(&dir.path().join("gone.deb"), dir.path()).unwrap_err();
        assert!(error.to_string().contains("gone.deb"), "{error}");
    }
}
