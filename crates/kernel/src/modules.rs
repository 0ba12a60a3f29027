//! Which modules a machine loads, and in which order.
//!
//! A package has no `modules.dep` (its scripts would make it, and are not run), so dependencies are
//! read from the modules themselves, `depends=` in `.modinfo`. What is built in has no file, and is
//! in nobody's `depends=`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use crate::elf::{Elf, RELOCATABLE};
use crate::{KernelError, failed, unfit, unpack};

/// Without these there is no disk, no network, no root.
const NEEDED: [&str; 7] =
    ["virtio_mmio", "virtio_blk", "virtio_net", "virtio_console", "ext4", "erofs", "overlay"];
/// Asked for by name while others start (not in their `depends=`), where it is not built in.
const ASKED_FOR: &str = "crc32c_generic";

/// A large one, of graphics cards, has 20 MB; ours have less than one.
const MODULE_MAX: u64 = 64 << 20;
/// Two digits number them; Debian 12's own kernel needs twenty.
const CHOSEN_MAX: usize = 64;

/// What the kernel puts behind a module and its signature.
const SIGNED: &[u8] = b"~Module signature appended~\n";
/// `struct module_signature`: five bytes, three of padding, the length of the signature.
const SIGNATURE_HEADER: usize = 12;

/// Where modules come from.
#[derive(Debug, Default)]
pub(crate) struct Supply {
    /// By name, as in `lsmod`.
    pub modules: BTreeMap<String, Stored>,
    /// What needs no module; None: nobody knows.
    pub built_in: Option<BTreeSet<String>>,
    /// Whether the kernel is known to load modules without a signature.
    pub unsigned_load: bool,
}

/// A module as it is found, probably compressed.
#[derive(Debug)]
pub(crate) enum Stored {
    Bytes(Vec<u8>),
    File(PathBuf),
}

impl Stored {
    fn unpacked(&self) -> std::io::Result<Vec<u8>> {
        match self {
            Self::Bytes(bytes) => unpack::whole(bytes, MODULE_MAX),
            Self::File(path) => {
                let mut bytes = Vec::new();
                File::open(path)?.take(MODULE_MAX).read_to_end(&mut bytes)?;
                unpack::whole(&bytes, MODULE_MAX)
            }
        }
    }
}

/// A module as it is loaded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Module {
    pub name: String,
    pub bytes: Vec<u8>,
}

/// The name of the module in a file, or None if there is none in it.
pub(crate) fn name_of(file: &str) -> Option<String> {
    let stem =
        [".ko", ".ko.xz", ".ko.zst", ".ko.gz"].iter().find_map(|end| file.strip_suffix(end))?;
    let name = stem.replace('-', "_");
    is_name(&name).then_some(name)
}

/// Longer than any: the kernel's own limit is 56.
const NAME_MAX: usize = 64;

fn is_name(name: &str) -> bool {
    let ours = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && name.len() <= NAME_MAX && name.chars().all(ours)
}

/// The names in a `modules.builtin`.
pub(crate) fn built_in(text: &str) -> BTreeSet<String> {
    let files = text.lines().filter_map(|line| line.rsplit('/').next());
    files.filter_map(name_of).collect()
}

/// Everything that a machine has to load, each after what it depends on.
pub(crate) fn choose(supply: &Supply, release: &str) -> Result<Vec<Module>, KernelError> {
    let mut choice = Choice { supply, release, begun: BTreeSet::new(), chosen: Vec::new() };
    if supply.modules.contains_key(ASKED_FOR) {
        choice.add(ASKED_FOR)?;
    }
    for name in NEEDED {
        let built_in = supply.built_in.as_ref();
        if built_in.is_some_and(|names| names.contains(name)) {
            continue;
        }
        // Where nobody knows what is built in, what has no file is.
        if supply.modules.contains_key(name) || built_in.is_some() {
            choice.add(name)?;
        }
    }
    Ok(choice.chosen)
}

struct Choice<'a> {
    supply: &'a Supply,
    release: &'a str,
    begun: BTreeSet<String>,
    chosen: Vec<Module>,
}

impl Choice<'_> {
    /// As deep as there are modules in [`CHOSEN_MAX`], never deeper.
    fn add(&mut self, name: &str) -> Result<(), KernelError> {
        if self.chosen.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let refused = |why: String| unfit(format!("module {name}"), why);
        if self.begun.len() == CHOSEN_MAX {
            return Err(refused(format!("more than {CHOSEN_MAX} modules depend on each other")));
        }
        if !self.begun.insert(name.to_owned()) {
            return Err(refused("it depends on itself".to_owned()));
        }
        let Some(stored) = self.supply.modules.get(name) else {
            return Err(refused(
                "the kernel has no such module, and it is not built in".to_owned(),
            ));
        };
        let bytes = stored.unpacked().map_err(failed(format!("unpack the module {name}")))?;
        for dependency in dependencies(&bytes, self.release).map_err(refused)? {
            self.add(&dependency)?;
        }
        let bytes = match self.supply.unsigned_load {
            true => unsigned(bytes).map_err(refused)?,
            false => bytes,
        };
        self.chosen.push(Module { name: name.to_owned(), bytes });
        Ok(())
    }
}

/// What has to be loaded before it. A module of another kernel is refused.
fn dependencies(module: &[u8], release: &str) -> Result<Vec<String>, String> {
    let elf = Elf::parse(module)?;
    if elf.kind != RELOCATABLE {
        return Err("it is no module".to_owned());
    }
    let mut names = Vec::new();
    let mut made_for = None;
    for (key, value) in elf.module_information()? {
        match key {
            "depends" => names.extend(value.split(',').filter(|name| !name.is_empty())),
            "vermagic" => made_for = value.split(' ').next(),
            _ => (),
        }
    }
    if made_for != Some(release) {
        let made_for = made_for.unwrap_or("no known one");
        return Err(format!("it is made for the kernel {made_for}, not {release}"));
    }
    let names: Vec<String> = names.iter().map(|name| name.replace('-', "_")).collect();
    match names.iter().find(|name| !is_name(name)) {
        Some(odd) => Err(format!("it depends on {odd:?}, which is no name")),
        None => Ok(names),
    }
}

/// The module without its signature: checking one costs a guest 40 ms where it is emulated.
fn unsigned(mut module: Vec<u8>) -> Result<Vec<u8>, String> {
    let Some(signed) = module.strip_suffix(SIGNED) else { return Ok(module) };
    let broken = "its signature is broken";
    let header = signed.last_chunk::<SIGNATURE_HEADER>().ok_or(broken)?;
    let [.., signer, key, _, _, _, a, b, c, d] = *header;
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    let behind = SIGNATURE_HEADER + usize::from(signer) + usize::from(key) + length;
    let end = signed.len().checked_sub(behind).ok_or(broken)?;
    module.truncate(end);
    Ok(module)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge;

    const RELEASE: &str = "6.1.0-x";

    fn supply(modules: &[(&str, &[&str])]) -> Supply {
        let forged = |(name, depends): &(&str, &[&str])| {
            let bytes = forge::xz(&forge::module(RELEASE, depends));
            ((*name).to_owned(), Stored::Bytes(bytes))
        };
        let modules: BTreeMap<_, _> = modules.iter().map(forged).collect();
        let all = NEEDED.iter().filter(|name| !modules.contains_key(**name));
        let built_in = Some(all.map(|name| (*name).to_owned()).collect());
        Supply { modules, built_in, unsigned_load: true }
    }

    fn names(supply: &Supply) -> Vec<String> {
        choose(supply, RELEASE).unwrap().into_iter().map(|module| module.name).collect()
    }

    fn why(supply: &Supply) -> String {
        choose(supply, RELEASE).unwrap_err().to_string()
    }

    #[test]
    fn what_a_module_depends_on_is_loaded_before_it_and_once() {
        let supply = supply(&[
            ("virtio_net", &["net-failover", "virtio"]),
            ("net_failover", &["failover"]),
            ("failover", &[]),
            ("virtio", &[]),
            ("virtio_blk", &["virtio"]),
            ("unrelated", &[]),
        ]);
        let expected = ["virtio", "virtio_blk", "failover", "net_failover", "virtio_net"];
        assert_eq!(names(&supply), expected);
    }

    #[test]
    fn what_is_built_in_is_not_loaded() {
        let mut supply = supply(&[("erofs", &[])]);
        assert_eq!(names(&supply), ["erofs"]);
        supply.built_in.as_mut().unwrap().insert("erofs".to_owned());
        assert_eq!(names(&supply), [""; 0]);
    }

    #[test]
    fn a_kernel_that_lacks_something_is_refused() {
        let mut supply = supply(&[]);
        supply.built_in.as_mut().unwrap().remove("erofs");
        assert!(why(&supply).starts_with("module erofs can't be used: the kernel has no such"));
        // Unless it may be built in.
        supply.built_in = None;
        assert_eq!(names(&supply), [""; 0]);
    }

    #[test]
    fn modules_that_depend_on_each_other_are_refused() {
        let supply = supply(&[("erofs", &["a"]), ("a", &["b"]), ("b", &["erofs"])]);
        assert_eq!(why(&supply), "module erofs can't be used: it depends on itself");
    }

    #[test]
    fn a_chain_without_end_is_refused() {
        let chain: Vec<(String, String)> =
            (0..100).map(|at| (format!("m{at}"), format!("m{}", at + 1))).collect();
        let next: Vec<[&str; 1]> = chain.iter().map(|(_, next)| [next.as_str()]).collect();
        let mut modules: Vec<(&str, &[&str])> = vec![("erofs", &["m0"])];
        modules.extend(chain.iter().zip(&next).map(|((name, _), next)| (name.as_str(), &next[..])));
        assert!(why(&supply(&modules)).contains("more than 64 modules"));
    }

    #[test]
    fn a_dependency_that_is_missing_or_no_name_is_refused() {
        assert!(why(&supply(&[("erofs", &["gone"])])).contains("module gone"));
        assert!(why(&supply(&[("erofs", &["../x"])])).contains("which is no name"));
    }

    #[test]
    fn a_module_of_another_kernel_is_refused() {
        let error = choose(&supply(&[("erofs", &[])]), "6.1.0-y").unwrap_err().to_string();
        assert!(error.contains("made for the kernel 6.1.0-x, not 6.1.0-y"), "{error}");
    }

    #[test]
    fn signatures_go_only_where_the_kernel_can_do_without() {
        let module = forge::module(RELEASE, &[]);
        let mut supply = supply(&[]);
        supply.modules.insert("erofs".into(), Stored::Bytes(forge::signed(&module)));
        supply.built_in = None;
        assert_eq!(choose(&supply, RELEASE).unwrap()[0].bytes, module);
        supply.unsigned_load = false;
        assert_eq!(choose(&supply, RELEASE).unwrap()[0].bytes, forge::signed(&module));
    }

    #[test]
    fn a_signature_longer_than_its_module_is_refused() {
        let mut module = forge::signed(b"short");
        let at = module.len() - SIGNED.len() - 4;
        module[at..at + 4].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(unsigned(module).is_err());
        assert!(unsigned(SIGNED.to_vec()).is_err());
    }

    #[test]
    fn names_are_those_of_lsmod() {
        assert_eq!(name_of("net-failover.ko.xz").as_deref(), Some("net_failover"));
        assert_eq!(name_of("overlay.ko").as_deref(), Some("overlay"));
        assert_eq!(name_of("ext4.ko.zst").as_deref(), Some("ext4"));
        for other in ["modules.order", ".ko", "a.b.ko", "a.ko.sig"] {
            assert_eq!(name_of(other), None, "{other}");
        }
        let built_in = built_in("kernel/fs/ext4/ext4.ko\nkernel/drivers/char/virtio-x.ko\n\nodd\n");
        assert_eq!(built_in.into_iter().collect::<Vec<_>>(), ["ext4", "virtio_x"]);
    }
}
