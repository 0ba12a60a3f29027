//! Images of several distributions, as directories.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::certificate::Certificate;
use super::samples::{ONE, OTHER};
use super::stores::{CA_BUNDLE, OUR_CA, Stores};

/// What the images trust; not a certificate, as nobody looks.
const THEIRS: &str = "# theirs\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

struct Image {
    root: TempDir,
}

impl Image {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        Self { root }
    }

    fn debian() -> Self {
        let image = Self::new();
        image.write("etc/debian_version", "13\n");
        image.write("etc/ssl/certs/ca-certificates.crt", THEIRS);
        fs::create_dir_all(image.path("usr/local/share/ca-certificates")).unwrap();
        image
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        symlink(target, self.path(path)).unwrap();
    }

    /// What a program inside reads there.
    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.stores().at(path).unwrap()).ok()
    }

    fn stores(&self) -> Stores<'_> {
        Stores::new(self.root.path())
    }

    fn install(&self, text: &str) {
        self.install_all(&[text]);
    }

    fn install_all(&self, texts: &[&str]) {
        let complaints = self.stores().install(&parsed(texts)).unwrap();
        assert_eq!(complaints, Vec::<String>::new());
    }

    fn remove(&self) {
        assert_eq!(self.stores().remove(), Some(Vec::new()));
    }

    /// All that is in it.
    fn all(&self) -> BTreeMap<PathBuf, String> {
        let mut all = BTreeMap::new();
        look(self.root.path(), &mut all);
        all
    }
}

fn look(directory: &Path, all: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let place = entry.unwrap().path();
        match fs::read_link(&place) {
            Ok(target) => drop(all.insert(place, format!("-> {}", target.display()))),
            Err(_) if place.is_dir() => look(&place, all),
            Err(_) => drop(all.insert(place.clone(), fs::read_to_string(place).unwrap())),
        }
    }
}

fn parsed(texts: &[&str]) -> Vec<Certificate> {
    texts.iter().map(|text| Certificate::parse(text).unwrap()).collect()
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn a_debian_trusts_it_everywhere_and_all_others_as_before() {
    let image = Image::debian();
    image.install(ONE);
    let bundle = image.read("/etc/ssl/certs/ca-certificates.crt").unwrap();
    assert!(bundle.starts_with(THEIRS));
    assert_eq!(count(&bundle, ONE), 1);
    assert_eq!(image.read(OUR_CA).unwrap(), ONE);
    assert_eq!(image.read(CA_BUNDLE).unwrap(), bundle);
    assert_eq!(image.read("/usr/local/share/ca-certificates/torpor.crt").unwrap(), ONE);
    assert_eq!(image.read("/etc/ssl/certs/f7516026.0").unwrap(), ONE);
}

#[test]
fn several_are_trusted_together_and_leave_one_by_one() {
    let image = Image::debian();
    image.install_all(&[ONE, OTHER]);
    let both = [ONE, OTHER].concat();
    assert_eq!(image.read(OUR_CA).unwrap(), both);
    assert_eq!(image.read("/usr/local/share/ca-certificates/torpor.crt").unwrap(), both);
    for hashed in ["/etc/ssl/certs/f7516026.0", "/etc/ssl/certs/9f811547.0"] {
        assert_eq!(image.read(hashed).unwrap(), both, "{hashed}");
    }
    let bundle = image.read(CA_BUNDLE).unwrap();
    assert_eq!((count(&bundle, ONE), count(&bundle, OTHER)), (1, 1));
    let before = image.all();
    image.install_all(&[ONE, OTHER]);
    assert_eq!(image.all(), before);
    image.install(OTHER);
    let bundle = image.read(CA_BUNDLE).unwrap();
    assert_eq!((count(&bundle, ONE), count(&bundle, OTHER)), (0, 1));
    assert!(fs::symlink_metadata(image.path("etc/ssl/certs/f7516026.0")).is_err());
    image.remove();
    assert_eq!(image.read("/etc/ssl/certs/ca-certificates.crt").unwrap(), THEIRS);
}

#[test]
fn done_twice_is_done_once_and_touches_nothing() {
    let image = Image::debian();
    image.install(ONE);
    let bundle = image.path("etc/ssl/certs/ca-certificates.crt");
    let (before, inode) = (image.all(), fs::metadata(&bundle).unwrap().ino());
    image.install(ONE);
    assert_eq!(image.all(), before);
    assert_eq!(fs::metadata(&bundle).unwrap().ino(), inode);
}

#[test]
fn another_one_takes_its_place() {
    let image = Image::debian();
    image.install(ONE);
    image.install(OTHER);
    for (place, text) in image.all() {
        assert_eq!(count(&text, ONE), 0, "{}", place.display());
    }
    let bundle = image.read(CA_BUNDLE).unwrap();
    assert_eq!((count(&bundle, THEIRS), count(&bundle, OTHER)), (1, 1));
    assert_eq!(image.read("/etc/ssl/certs/9f811547.0").unwrap(), OTHER);
    assert!(fs::symlink_metadata(image.path("etc/ssl/certs/f7516026.0")).is_err());
}

#[test]
fn removed_it_was_never_there_but_for_what_programs_that_run_were_told() {
    let image = Image::debian();
    assert_eq!(image.stores().remove(), None, "nothing to remove");
    let mut before = image.all();
    image.install(ONE);
    image.remove();
    let bundle = "-> /etc/ssl/certs/ca-certificates.crt".to_owned();
    before.insert(image.path("etc/torpor/authorities.pem"), bundle);
    assert_eq!(image.all(), before);
    assert_eq!(image.stores().remove(), None);
}

#[test]
fn what_the_images_own_tool_made_of_it_is_replaced_and_removed_too() {
    let image = Image::debian();
    image.install(ONE);
    // As `update-ca-certificates` does.
    image.write("etc/ssl/certs/ca-certificates.crt", &[THEIRS, ONE].concat());
    image.install(ONE);
    assert_eq!(count(&image.read(CA_BUNDLE).unwrap(), ONE), 1);
    image.write("etc/ssl/certs/ca-certificates.crt", &[THEIRS, ONE].concat());
    image.install(OTHER);
    assert_eq!(count(&image.read(CA_BUNDLE).unwrap(), ONE), 0);
    image.write("etc/ssl/certs/ca-certificates.crt", &[THEIRS, OTHER].concat());
    image.remove();
    assert_eq!(image.read("/etc/ssl/certs/ca-certificates.crt").unwrap(), THEIRS);
}

#[test]
fn a_debian_that_gets_its_bundle_later_finds_ours_for_it() {
    let image = Image::new();
    image.write("etc/debian_version", "13\n");
    let before = image.all();
    image.install(ONE);
    assert_eq!(count(&image.read(CA_BUNDLE).unwrap(), ONE), 1);
    assert_eq!(image.read("/usr/local/share/ca-certificates/torpor.crt").unwrap(), ONE);
    // Somebody installs the package.
    image.write("etc/ssl/certs/ca-certificates.crt", &[THEIRS, ONE].concat());
    assert_eq!(count(&image.read(CA_BUNDLE).unwrap(), THEIRS), 1);
    image.write("etc/ssl/certs/ca-certificates.crt", ONE);
    image.remove();
    assert_eq!(image.all(), before);
}

#[test]
fn an_alpine_with_one_bundle_under_two_names_has_it_once() {
    let image = Image::new();
    image.write("etc/alpine-release", "3.20\n");
    image.write("etc/ssl/certs/ca-certificates.crt", THEIRS);
    image.link("etc/ssl/cert.pem", "certs/ca-certificates.crt");
    image.install(ONE);
    assert_eq!(count(&image.read("/etc/ssl/cert.pem").unwrap(), ONE), 1);
    assert!(fs::read_link(image.path("etc/ssl/cert.pem")).is_ok(), "still a link");
}

#[test]
fn a_red_hat_has_it_behind_all_its_links() {
    let image = Image::new();
    let extracted = "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem";
    image.write(extracted, THEIRS);
    image.link("etc/pki/tls/certs/ca-bundle.crt", &format!("/{extracted}"));
    image.link("etc/ssl/certs", "../pki/tls/certs");
    image.link("etc/pki/tls/cert.pem", &format!("/{extracted}"));
    fs::create_dir_all(image.path("etc/pki/ca-trust/source/anchors")).unwrap();
    fs::set_permissions(image.path(extracted), fs::Permissions::from_mode(0o444)).unwrap();
    image.install(ONE);
    let bundle = image.read("/etc/pki/tls/certs/ca-bundle.crt").unwrap();
    assert_eq!((count(&bundle, THEIRS), count(&bundle, ONE)), (1, 1));
    assert_eq!(image.read(CA_BUNDLE).unwrap(), bundle);
    assert_eq!(image.read("/etc/pki/ca-trust/source/anchors/torpor.pem").unwrap(), ONE);
    assert_eq!(image.read("/etc/ssl/certs/f7516026.0").unwrap(), ONE);
    assert_eq!(fs::metadata(image.path(extracted)).unwrap().mode() & 0o777, 0o444);
}

#[test]
fn an_image_that_trusts_nobody_trusts_us_and_whom_its_python_trusts() {
    let image = Image::new();
    image.install(ONE);
    assert_eq!(count(&image.read(CA_BUNDLE).unwrap(), "BEGIN CERTIFICATE"), 1);
    assert!(!image.path("etc/ssl").exists() && !image.path("usr").exists());
    image.remove();
    assert!(!image.path("etc/torpor").exists());
    image.write("usr/local/lib/python3.13/site-packages/pip/_vendor/certifi/cacert.pem", THEIRS);
    image.install(ONE);
    let authorities = image.read(CA_BUNDLE).unwrap();
    assert_eq!((count(&authorities, THEIRS), count(&authorities, ONE)), (1, 1));
    image.remove();
    assert_eq!(image.read(CA_BUNDLE).unwrap(), THEIRS);
}

#[test]
fn a_link_that_leads_out_of_the_root_leads_into_it() {
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("bundle.pem");
    fs::write(&victim, THEIRS).unwrap();
    for up in [String::new(), "../".repeat(20)] {
        let image = Image::new();
        let target = format!("{up}{}", victim.display());
        image.link("etc/ssl/certs/ca-certificates.crt", &target);
        image.install(ONE);
        assert_eq!(fs::read_to_string(&victim).unwrap(), THEIRS);
        assert_eq!(count(&image.read(CA_BUNDLE).unwrap(), ONE), 1);
    }
}

#[test]
fn strange_things_in_place_of_bundles_stop_nobody() {
    let image = Image::new();
    image.link("etc/ssl/cert.pem", "cert.pem");
    fs::create_dir_all(image.path("etc/ssl/ca-bundle.pem")).unwrap();
    fs::create_dir_all(image.path("etc/ssl/certs")).unwrap();
    let fifo = image.path("etc/ssl/certs/ca-certificates.crt");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o644.into(), 0)
        .unwrap();
    let complaints = image.stores().install(&parsed(&[ONE])).unwrap();
    assert_eq!(complaints.len(), 2, "{complaints:?}");
    assert_eq!(count(&image.read(CA_BUNDLE).unwrap(), ONE), 1);
    // It can't be known that nothing of ours is there, so the next time it is looked for again.
    assert_eq!(image.stores().remove().unwrap().len(), 2);
    assert!(image.path("etc/torpor/authority.pem").exists());
}
