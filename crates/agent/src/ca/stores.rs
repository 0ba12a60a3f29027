//! Where the programs of an image look for CA certificates, in the ways of several distributions.
//!
//! Invariants:
//! - [`OUR_CA`] is written first and removed last: while it is there, something of ours may be
//!   anywhere; without it nothing is.
//! - Only what is there already is added to, but where a distribution would look for it later.
//! - Links are followed, and never out of the root.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use rustix::io::Errno;

use super::bundle;
use super::certificate::Certificate;
use crate::identity::replace;

/// Ours alone.
pub(super) const OUR_CA: &str = "/etc/torpor/authority.pem";
/// All that the image trusts, and ours: a link to the image's own bundle, if it has one.
pub(super) const CA_BUNDLE: &str = "/etc/torpor/authorities.pem";
/// Everything of ours that is in no place of the image's.
pub(super) const OURS: &str = "/etc/torpor";
/// All that an image trusts in one file: Debian, Alpine and Arch; Red Hat, twice; SUSE; Alpine and
/// the BSDs.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Where the tools that make the bundles look for more: Debian and Alpine, Red Hat, SUSE, Arch.
const ANCHORS: [&str; 4] = [
    "/usr/local/share/ca-certificates/torpor.crt",
    "/etc/pki/ca-trust/source/anchors/torpor.pem",
    "/etc/pki/trust/anchors/torpor.pem",
    "/etc/ca-certificates/trust-source/anchors/torpor.pem",
];
/// An image with one of these gets its bundle when somebody installs it, so the first of [`BUNDLES`]
/// and [`ANCHORS`] are made.
const BUNDLE_COMES_LATER: [&str; 2] = ["/etc/debian_version", "/etc/alpine-release"];
/// Where OpenSSL looks for a certificate by the name of its subject.
const HASHED: &str = "/etc/ssl/certs";
/// Certificates with the same name are numbered.
const SAME_NAME_MAX: usize = 10;
/// Where programs of Python have a bundle of their own, for images that have no other: the
/// directories of Pythons, and where in one of them.
const PYTHONS: [&str; 3] = ["/usr/local/lib", "/usr/lib", "/opt/conda/lib"];
const IN_PYTHON: [&str; 4] = [
    "site-packages/certifi/cacert.pem",
    "site-packages/pip/_vendor/certifi/cacert.pem",
    "dist-packages/certifi/cacert.pem",
    "dist-packages/pip/_vendor/certifi/cacert.pem",
];
/// As many links as the kernel follows.
const LINKS_MAX: usize = 40;

/// The places of one root, for one time of looking.
pub(super) struct Stores<'a> {
    root: &'a Path,
    /// Where the links on the ways lead, which are asked for once: in a machine each look costs as
    /// much as reading a small file.
    links: RefCell<BTreeMap<PathBuf, Option<PathBuf>>>,
}

impl<'a> Stores<'a> {
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root, links: RefCell::default() }
    }

    /// Makes everybody trust them. What of the image's own can't be changed is told, and only that: the
    /// environment leads to ours.
    pub(super) fn install(&self, certificates: &[Certificate]) -> io::Result<Vec<String>> {
        let mut before = self.installed().unwrap_or_default();
        fs::create_dir_all(self.directly(OURS))?;
        let text: String = certificates.iter().map(Certificate::pem).collect();
        replace(&self.directly(OUR_CA), text.as_bytes(), None)?;
        before.retain(|before| !certificates.contains(before));
        let mut complaints = Complaints::default();
        for before in &before {
            complaints.hear(HASHED, self.remove_hashed(before));
        }
        let comes_later = BUNDLE_COMES_LATER.iter().any(|mark| self.exists(mark));
        for (index, anchor) in ANCHORS.into_iter().enumerate() {
            let make = comes_later && index == 0;
            complaints.hear(anchor, self.add_anchor(anchor, &text, make));
        }
        let mut bundles = self.bundles();
        if comes_later && bundles.is_empty() {
            complaints.hear(BUNDLES[0], self.begin_bundle());
            bundles = self.bundles();
        }
        let mut whole = None;
        for (bundle, place) in bundles {
            let added = bundle::add(&place, certificates, &before);
            if complaints.hear(bundle, added) {
                whole = whole.or(Some(bundle));
            }
        }
        for certificate in certificates {
            complaints.hear(HASHED, self.add_hashed(certificate));
        }
        self.gather(certificates, whole)?;
        Ok(complaints.0)
    }

    /// Nobody trusts them any more. Programs that run were told to look at [`CA_BUNDLE`], which
    /// therefore stays if the image trusts anybody else. Tells what could not be changed, if ours was
    /// there at all; it is tried again next time.
    pub(super) fn remove(&self) -> Option<Vec<String>> {
        let before = self.installed()?;
        let mut complaints = Complaints::default();
        for (bundle, place) in self.bundles() {
            complaints.hear(bundle, bundle::take_out(&place, &before));
        }
        for anchor in ANCHORS {
            complaints.hear(anchor, self.at(anchor).and_then(|place| gone(fs::remove_file(place))));
        }
        for before in &before {
            complaints.hear(HASHED, self.remove_hashed(before));
        }
        let left = match (self.at(CA_BUNDLE), fs::read_link(self.directly(CA_BUNDLE))) {
            // It leads to what the image still trusts.
            (Ok(place), Ok(_)) if place.exists() => Ok(()),
            (_, Ok(_)) => gone(fs::remove_file(self.directly(CA_BUNDLE))),
            (_, Err(_)) => bundle::take_out(&self.directly(CA_BUNDLE), &before),
        };
        complaints.hear(CA_BUNDLE, left);
        if complaints.0.is_empty() {
            complaints.hear(OUR_CA, gone(fs::remove_file(self.directly(OUR_CA))));
            // Unless something is left in it.
            let _ = fs::remove_dir(self.directly(OURS));
        }
        Some(complaints.0)
    }

    /// What is there of ours: nothing, or these; none of them if they can't be read.
    fn installed(&self) -> Option<Vec<Certificate>> {
        let place = self.directly(OUR_CA);
        fs::symlink_metadata(&place).ok()?;
        let text = bundle::read(&place).ok().and_then(|(text, _)| String::from_utf8(text).ok());
        Some(text.and_then(|text| Certificate::parse_all(&text).ok()).unwrap_or_default())
    }

    /// The bundles that are there, each once, and where.
    fn bundles(&self) -> Vec<(&'static str, PathBuf)> {
        let mut bundles: Vec<(&str, PathBuf)> = Vec::new();
        for bundle in BUNDLES {
            let Ok(place) = self.at(bundle) else { continue };
            if place.exists() && !bundles.iter().any(|(_, known)| *known == place) {
                bundles.push((bundle, place));
            }
        }
        bundles
    }

    fn add_anchor(&self, anchor: &str, text: &str, make: bool) -> io::Result<()> {
        let place = self.at(anchor)?;
        let Some(directory) = place.parent() else { return Ok(()) };
        if make {
            fs::create_dir_all(directory)?;
        }
        if !directory.is_dir() {
            return Ok(());
        }
        replace(&place, text.as_bytes(), None)
    }

    /// An image of a distribution that has no bundle yet: what is known of whom to trust.
    fn begin_bundle(&self) -> io::Result<()> {
        let place = self.at(BUNDLES[0])?;
        if let Some(directory) = place.parent() {
            fs::create_dir_all(directory)?;
        }
        replace(&place, &self.pythons_bundle(), None)
    }

    /// One file with everything: `whole` has it all, or there is none of the image's.
    fn gather(&self, certificates: &[Certificate], whole: Option<&str>) -> io::Result<()> {
        let place = self.directly(CA_BUNDLE);
        let Some(whole) = whole else {
            return replace(&place, &bundle::with(&self.pythons_bundle(), certificates, &[]), None);
        };
        if fs::read_link(&place).is_ok_and(|target| target == Path::new(whole)) {
            return Ok(());
        }
        let draft = place.with_extension("torpor");
        gone(fs::remove_file(&draft))?;
        std::os::unix::fs::symlink(whole, &draft)?;
        fs::rename(&draft, &place)
    }

    /// The bundle that a Python of the image brought along, or nothing.
    fn pythons_bundle(&self) -> Vec<u8> {
        let entries =
            PYTHONS.into_iter().filter_map(|place| fs::read_dir(self.at(place).ok()?).ok());
        let names = entries.flatten().filter_map(Result::ok);
        let pythons =
            names.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"python"));
        let mut bundles =
            pythons.flat_map(|python| IN_PYTHON.map(|inside| python.path().join(inside)));
        bundles
            .find_map(|place| bundle::read(&place).ok())
            .map(|(text, _)| text)
            .unwrap_or_default()
    }

    // === By the name of its subject ===

    fn add_hashed(&self, certificate: &Certificate) -> io::Result<()> {
        let Some(hash) = certificate.subject_hash() else { return Ok(()) };
        let directory = self.at(HASHED)?;
        if !directory.is_dir() {
            return Ok(());
        }
        for number in 0..SAME_NAME_MAX {
            let link = directory.join(format!("{hash}.{number}"));
            match std::os::unix::fs::symlink(OUR_CA, &link) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
            if fs::read_link(&link).is_ok_and(|target| target == Path::new(OUR_CA)) {
                return Ok(());
            }
        }
        Err(io::Error::other("too many certificates have the same name"))
    }

    fn remove_hashed(&self, certificate: &Certificate) -> io::Result<()> {
        let Some(hash) = certificate.subject_hash() else { return Ok(()) };
        let directory = self.at(HASHED)?;
        for number in 0..SAME_NAME_MAX {
            let link = directory.join(format!("{hash}.{number}"));
            match fs::read_link(&link) {
                Ok(target) if target == Path::new(OUR_CA) => fs::remove_file(link)?,
                // They are numbered without gaps.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }

    // === Paths ===

    fn exists(&self, path: &str) -> bool {
        self.at(path).is_ok_and(|place| place.exists())
    }

    /// Where a path of ours is, which is no link unless we made it one.
    fn directly(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Where a path of the image leads, with the root as what links begin from.
    pub(super) fn at(&self, path: &str) -> io::Result<PathBuf> {
        let mut left: VecDeque<OsString> = names(Path::new(path)).collect();
        let (mut at, mut links) = (PathBuf::new(), 0);
        while let Some(name) = left.pop_front() {
            if name == ".." {
                at.pop();
                continue;
            }
            at.push(name);
            let Some(target) = self.target(&at) else { continue };
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP.into());
            }
            at.pop();
            if target.is_absolute() {
                at.clear();
            }
            for name in names(&target).collect::<Vec<_>>().into_iter().rev() {
                left.push_front(name);
            }
        }
        Ok(self.root.join(at))
    }

    /// Where the link at a path in the root leads. What is none, or not there, shows when it is used.
    fn target(&self, path: &Path) -> Option<PathBuf> {
        let mut links = self.links.borrow_mut();
        if let Some(known) = links.get(path) {
            return known.clone();
        }
        let target = fs::read_link(self.root.join(path)).ok();
        links.insert(path.to_owned(), target.clone());
        target
    }
}

/// What could not be changed, in words.
#[derive(Default)]
struct Complaints(Vec<String>);

impl Complaints {
    /// Whether it was done.
    fn hear(&mut self, what: &str, done: io::Result<()>) -> bool {
        if let Err(error) = &done {
            self.0.push(format!("{what} could not be changed: {error}"));
        }
        done.is_ok()
    }
}

/// The names on the way, without the root and single dots.
fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsStr::new("..").to_owned()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    })
}

/// What is not there need not be removed.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
