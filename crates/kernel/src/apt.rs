//! A kernel through the machine's own package manager.
//!
//! apt knows whom this computer trusts and checks signatures down to the package; nothing is installed
//! and the package's scripts do not run. The newest cloud kernel that apt knows is taken, also from a
//! source that nothing is installed from by itself, such as bookworm-backports: it runs in guests, not
//! here.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::process::{Child, Command};
use tokio::time::{interval, timeout};

use crate::{Kernel, KernelError, failed, installed, prepare, release, unfit};

/// Depends on the newest kernel of its distribution.
const META: &str = "linux-image-cloud-amd64";
/// apt-cache answers in half a second, on a slow disk in some.
const ASK_MAX: Duration = Duration::from_secs(60);
/// 34 MB at 60 kB/s; apt has limits of its own for silence.
const DOWNLOAD_MAX: Duration = Duration::from_secs(600);
/// How often somebody is told how far it is.
const TELL: Duration = Duration::from_millis(300);
/// Lines of apt's complaint that are passed on.
const COMPLAINT_LINES: usize = 5;

/// What apt knows of a package.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Package {
    name: String,
    version: String,
    size: u64,
    sha256: String,
}

/// Gets the newest kernel for microVMs and prepares it; one that is here already is not downloaded
/// again. `progress` is told what is being done, some times a second. If the future is dropped, the
/// download ends and nothing is left but what was there before; only a preparation that has begun runs
/// to its end.
pub async fn fetch(
    kernels: &Path,
    progress: &mut (dyn FnMut(&str) + Send),
) -> Result<Kernel, KernelError> {
    progress("asking apt for the newest kernel");
    let package = newest_package().await?;
    let place = kernels.to_owned();
    let sha256 = package.sha256.clone();
    let known = blocking(move || Ok(installed::of_package(&place, &sha256))).await?;
    if let Some(kernel) = known {
        return Ok(kernel);
    }
    installed::check_place(kernels)?;
    let dir = workplace().map_err(failed("make a directory for the download"))?;
    let path = download(&package, dir.path(), progress).await?;
    progress(&format!("preparing {}", package.name));
    let place = kernels.to_owned();
    blocking(move || {
        let bytes = prepare::read_package(&path)?;
        // Checked is what was read, so it does not matter who could write in that directory.
        check(&bytes, &package)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        drop(dir);
        prepare::prepare_bytes(&bytes, name, Some(package.sha256), &place)
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, KernelError> + Send + 'static,
) -> Result<T, KernelError> {
    tokio::task::spawn_blocking(work).await.map_err(failed("prepare the kernel"))?
}

fn check(bytes: &[u8], package: &Package) -> Result<(), KernelError> {
    match hex::encode(Sha256::digest(bytes)) == package.sha256 && bytes.len() as u64 == package.size
    {
        true => Ok(()),
        false => Err(unfit(package.name.as_str(), "it is not what apt's signed lists say")),
    }
}

async fn newest_package() -> Result<Package, KernelError> {
    let text = show(META).await?;
    let (name, version) = newest_kernel(&text)
        .ok_or_else(|| KernelError::NoSource(format!("its apt does not know Debian's {META}")))?;
    let text = show(&format!("{name}={version}")).await?;
    let found = packages(&text).into_iter().find(|found| found.name == name);
    found.ok_or_else(|| KernelError::NoSource(format!("its apt does not have {name}")))
}

/// What apt has to say about a package; empty: nothing.
async fn show(package: &str) -> Result<String, KernelError> {
    let mut command = apt("apt-cache");
    command.args(["show", package]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let asked = timeout(ASK_MAX, command.output()).await;
    let output: Output = match asked.map_err(failed("get an answer of apt-cache in time"))? {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(KernelError::NoSource("it has no apt, so it is no Debian".to_owned()));
        }
        Err(error) => return Err(failed("run apt-cache")(error)),
    };
    // It fails for what it does not know.
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// In the language that is read here, and asking nobody.
fn apt(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// Name and version of the newest kernel that a version of the meta package depends on. Candidates for
/// a release are for those who want to try them.
fn newest_kernel(text: &str) -> Option<(String, String)> {
    let stanzas = text.split("\n\n").filter(|stanza| field(stanza, "Package") == Some(META));
    let kernels = stanzas.filter_map(|stanza| {
        let version = field(stanza, "Version").filter(|version| !version.contains("~rc"))?;
        let mut depends = field(stanza, "Depends")?.split(',').map(str::trim);
        let kernel = depends.find(|name| name.starts_with("linux-image-"))?;
        let (name, exact) = kernel.split_once(' ').unwrap_or((kernel, ""));
        let exact = exact.trim_start_matches("(= ").trim_end_matches(')').trim();
        let version = if exact.is_empty() { version } else { exact };
        is_plain(name).then_some(())?;
        is_plain(version).then(|| (name.to_owned(), version.to_owned()))
    });
    kernels.max_by(|one, other| release::compare(&one.1, &other.1))
}

fn packages(text: &str) -> Vec<Package> {
    let package = |stanza: &str| {
        Some(Package {
            name: field(stanza, "Package")?.to_owned(),
            version: field(stanza, "Version").filter(|version| is_plain(version))?.to_owned(),
            size: field(stanza, "Size")?.parse().ok()?,
            sha256: field(stanza, "SHA256").filter(|hash| is_sha256(hash))?.to_owned(),
        })
    };
    text.split("\n\n").filter_map(package).collect()
}

/// The value of a line `Name: value`; those that go on over several lines are not asked for.
fn field<'a>(stanza: &'a str, name: &str) -> Option<&'a str> {
    let mut values = stanza.lines().filter_map(|line| line.split_once(':'));
    values.find(|(key, _)| *key == name).map(|(_, value)| value.trim())
}

/// Names and versions go onto a command line: no options, no paths, no patterns.
fn is_plain(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || ".+-~:".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain)
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
}

/// A directory in which apt's own user may write, if we may say so: what talks to the network is
/// then not root.
fn workplace() -> io::Result<tempfile::TempDir> {
    let dir = tempfile::Builder::new().prefix("torpor-kernel-").tempdir()?;
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
    if rustix::process::geteuid().is_root()
        && let Some(user) = apt_user()
    {
        chown(dir.path(), Some(user), None)?;
    }
    Ok(dir)
}

fn apt_user() -> Option<u32> {
    let users = std::fs::read_to_string("/etc/passwd").ok()?;
    users.lines().find(|line| line.starts_with("_apt:"))?.split(':').nth(2)?.parse().ok()
}

async fn download(
    package: &Package,
    dir: &Path,
    progress: &mut (dyn FnMut(&str) + Send),
) -> Result<PathBuf, KernelError> {
    let mut command = apt("apt-get");
    command.args(["download", "-qq", &format!("{}={}", package.name, package.version)]);
    command.current_dir(dir).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().map_err(failed("run apt-get"))?;
    let ended = watch(child, package, dir, progress);
    let output = timeout(DOWNLOAD_MAX, ended).await.map_err(failed("download it in time"))?;
    let output = output.map_err(failed("run apt-get"))?;
    if !output.status.success() {
        let complaint = complaint(&String::from_utf8_lossy(&output.stderr));
        let action = format!("download {} (are apt's lists fresh? apt-get update)", package.name);
        return Err(failed(action)(complaint));
    }
    downloaded(dir).map_err(failed("find what apt-get downloaded"))
}

/// Until it ends, tells how far it is.
async fn watch(
    child: Child,
    package: &Package,
    dir: &Path,
    progress: &mut (dyn FnMut(&str) + Send),
) -> io::Result<Output> {
    let mut ended = Box::pin(child.wait_with_output());
    let mut ticks = interval(TELL);
    loop {
        tokio::select! {
            output = &mut ended => return output,
            _ = ticks.tick() => {
                let (done, all) = (size_of(dir) / 1_000_000, package.size / 1_000_000);
                progress(&format!("downloading {}: {done} of {all} MB", package.name));
            }
        }
    }
}

/// Of whatever there is in a directory.
fn size_of(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .filter(|it| it.is_file())
        .map(|it| it.len())
        .sum()
}

fn downloaded(dir: &Path) -> io::Result<PathBuf> {
    let mut paths = std::fs::read_dir(dir)?.flatten().map(|entry| entry.path());
    let package = paths.find(|path| path.extension().is_some_and(|end| end == "deb"));
    package.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
}

/// The end of what apt said.
fn complaint(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let from = lines.len().saturating_sub(COMPLAINT_LINES);
    match &lines[from..] {
        [] => "apt-get does not say why".to_owned(),
        lines => lines.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(version: &str, depends: &str) -> String {
        format!(
            "Package: {META}\nVersion: {version}\nDepends: {depends}\nDescription-en: text\n \
             Version: 9\n\n"
        )
    }

    fn newest(stanzas: &[String]) -> Option<(String, String)> {
        newest_kernel(&stanzas.concat())
    }

    #[test]
    fn the_newest_kernel_of_all_sources_is_taken() {
        let backport = "linux-image-6.12.95+deb12-cloud-amd64";
        let stanzas = [
            meta("6.1.190-1", "linux-image-6.1.0-54-cloud-amd64 (= 6.1.190-1)"),
            meta("6.12.95-1~bpo12+1", &format!("{backport} (= 6.12.95-1~bpo12+1)")),
            meta("6.1.176-1", "linux-image-6.1.0-51-cloud-amd64 (= 6.1.176-1)"),
        ];
        let expected = (backport.to_owned(), "6.12.95-1~bpo12+1".to_owned());
        assert_eq!(newest(&stanzas), Some(expected));
    }

    #[test]
    fn candidates_and_what_is_no_kernel_are_passed_over() {
        let stanzas = [
            meta("6.19~rc4-1~exp1", "linux-image-6.19-cloud-amd64 (= 6.19~rc4-1~exp1)"),
            meta("9.0-1", "linux-base"),
            meta("9.1-1", "linux-image---option (= 9.1-1)").replace(META, "linux-image-other"),
            meta("6.1.176-1", "initramfs-tools, linux-image-6.1.0-51-cloud-amd64"),
        ];
        let expected = ("linux-image-6.1.0-51-cloud-amd64".to_owned(), "6.1.176-1".to_owned());
        assert_eq!(newest(&stanzas), Some(expected));
        assert_eq!(newest(&[]), None);
    }

    #[test]
    fn nothing_but_names_reaches_a_command_line() {
        for name in ["linux-image-/etc/x", "linux-image-* ", "linux-image-a;b", "linux-image-a=b"] {
            assert_eq!(newest(&[meta("6.1-1", &format!("{name} (= 6.1-1)"))]), None, "{name}");
        }
        for version in ["-o", "1/2", "$(x)"] {
            let depends = format!("linux-image-6 (= {version})");
            assert_eq!(newest(&[meta("6.1-1", &depends)]), None, "{version}");
        }
    }

    #[test]
    fn a_package_without_a_hash_is_none() {
        let hash = "69c92f43b23821de79576fa4d7c86e2924ae2c1b247a47cc5ed9339e220fbcb7";
        let stanza =
            |hash: &str| format!("Package: linux-image-6\nVersion: 6-1\nSize: 7\nSHA256: {hash}\n");
        let found = packages(&stanza(hash));
        assert_eq!(found[0].sha256, hash);
        assert_eq!(found[0].size, 7);
        for odd in ["", "abc", &hash.to_uppercase()] {
            assert_eq!(packages(&stanza(odd)), [], "{odd}");
        }
    }

    #[test]
    fn a_download_that_is_not_what_the_lists_say_is_refused() {
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".to_owned();
        let package =
            Package { name: "linux-image-6".into(), version: "6-1".into(), size: 3, sha256 };
        check(b"abc", &package).unwrap();
        assert!(check(b"abd", &package).is_err());
        assert!(check(b"abc", &Package { size: 4, ..package }).is_err());
    }

    #[test]
    fn the_end_of_a_complaint_is_passed_on() {
        assert_eq!(complaint("\n"), "apt-get does not say why");
        assert_eq!(complaint("1\n2\n3\n4\n5\n6\n7\n"), "3; 4; 5; 6; 7");
    }
}
