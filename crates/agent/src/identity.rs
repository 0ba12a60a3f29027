//! Who the machine is: its name, its name servers, its randomness, whom it trusts.
//!
//! A fork wakes up as its original and is told here that it is somebody else.

use std::fs::{self, Metadata, OpenOptions, Permissions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;
use std::rc::Rc;

use torpor_protocol::guest::{Failure, FailureCode, Identity};

use crate::Mode;
use crate::agent::Agent;
use crate::ca;
use crate::failure::{cannot, failure};
use crate::files::{MODE_BITS, make_dirs};
use crate::process::user;

/// The longest name that the kernel takes.
const HOSTNAME_MAX: usize = 64;
/// Marks the line of ours in a file that belongs to the image.
const OURS: &str = "# torpor";
/// What the agent tells those inside, beside its socket.
const OURS_IN_RUN: &str = "/run/torpor";
/// Where the kernel tells which boot this is.
const KERNELS_RANDOM: &str = "/proc/sys/kernel/random";
/// Directories that programs expect, and their modes.
const DIRECTORIES: [(&str, u32); 3] = [("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/run", 0o755)];

/// Becomes `identity`. In another program's process it is only remembered, for new processes.
pub(crate) fn assume(agent: &Rc<Agent>, identity: Identity) -> Result<(), Failure> {
    let mut identity = identity;
    check(&identity)?;
    ca::check(&identity)?;
    if agent.mode == Mode::Init {
        name_machine(&identity.hostname).map_err(cannot("cannot set the hostname"))?;
        if !identity.nameservers.is_empty() {
            name_servers(&identity.nameservers).map_err(cannot("cannot write /etc/resolv.conf"))?;
        }
        stir(&identity.entropy);
        // What is missing in an image is made if it can be; processes say what they miss.
        for (directory, mode) in DIRECTORIES {
            let _ = make_dirs(Path::new(directory), mode, None);
        }
        if let Some(boot) = &identity.boot_id {
            name_boot(boot).map_err(cannot("cannot name this boot"))?;
        }
        if let Some(workdir) = &identity.workdir {
            let _ = make_dirs(Path::new(workdir), 0o755, None);
        }
        ca::assume(agent, &identity)?;
    } else {
        // Nobody can be made to trust it, and processes must not look for it.
        identity.ca = None;
        identity.extra_ca.clear();
    }
    *agent.identity.borrow_mut() = identity;
    Ok(())
}

fn check(identity: &Identity) -> Result<(), Failure> {
    let invalid = |message: String| Err(failure(FailureCode::Invalid, message));
    let name = &identity.hostname;
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if name.is_empty() || name.len() > HOSTNAME_MAX || !name.bytes().all(letter) {
        return invalid(format!("{name} is no hostname"));
    }
    if let Some(server) = identity.nameservers.iter().find(|it| it.parse::<IpAddr>().is_err()) {
        return invalid(format!("{server} is no address of a name server"));
    }
    let text = |text: &String| !text.contains('\0');
    let named = |name: &String| !name.is_empty() && !name.contains('=') && text(name);
    if !identity.env.iter().all(|(name, value)| named(name) && text(value)) {
        return invalid("an environment variable is not valid".to_owned());
    }
    if identity.workdir.as_ref().is_some_and(|workdir| !workdir.starts_with('/')) {
        return invalid("the working directory is not absolute".to_owned());
    }
    if let Some(boot) = identity.boot_id.as_ref().filter(|boot| !is_uuid(boot)) {
        return invalid(format!("{boot} is no UUID"));
    }
    Ok(())
}

/// Hexadecimal digits in five groups.
fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| group.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Programs look here to see that they were forked, and tell machines apart by these.
fn name_boot(boot: &str) -> io::Result<()> {
    let boot = boot.to_ascii_lowercase();
    fs::create_dir_all(OURS_IN_RUN)?;
    write(&Path::new(OURS_IN_RUN).join("boot_id"), &format!("{boot}\n"))?;
    write(Path::new("/etc/machine-id"), &format!("{}\n", boot.replace('-', "")))?;
    // Only where programs look that know nothing of us; not every kernel lets us.
    let _ = cover_kernels_boot(&boot);
    Ok(())
}

/// The kernel's own boot id is part of what is saved, so forks would share it: ours is mounted over
/// it, as a directory, because a kernel that saves itself takes no file. One that has more to tell
/// there is another kernel, and takes one.
fn cover_kernels_boot(boot: &str) -> io::Result<()> {
    let (ours, kernels) = (Path::new(OURS_IN_RUN).join("random"), Path::new(KERNELS_RANDOM));
    let entries = fs::read_dir(kernels)?.collect::<io::Result<Vec<_>>>()?;
    let alone = entries.iter().all(|entry| entry.file_name() == "boot_id");
    fs::create_dir_all(&ours)?;
    let (text, file) = (format!("{boot}\n"), ours.join("boot_id"));
    if alone {
        write(&file, &text)?;
    } else {
        // In place, for it may be mounted already.
        fs::write(&file, &text)?;
    }
    if fs::read_to_string(kernels.join("boot_id"))? == text {
        return Ok(());
    }
    if alone {
        rustix::mount::mount_bind(&ours, kernels)?;
    } else {
        rustix::mount::mount_bind(&file, kernels.join("boot_id"))?;
    }
    Ok(())
}

fn name_machine(hostname: &str) -> io::Result<()> {
    rustix::system::sethostname(hostname.as_bytes())?;
    fs::create_dir_all("/etc")?;
    write(Path::new("/etc/hostname"), &format!("{hostname}\n"))?;
    let before = user::read("/etc/hosts");
    write(Path::new("/etc/hosts"), &hosts(&before, hostname))
}

/// The hosts file with a line for this machine, whatever it was called before.
fn hosts(before: &str, hostname: &str) -> String {
    let kept = before.lines().filter(|line| !line.ends_with(OURS));
    let mut lines: Vec<String> = kept.map(str::to_owned).collect();
    if !lines.iter().any(|line| line.split_whitespace().any(|word| word == "localhost")) {
        lines.push("127.0.0.1 localhost".to_owned());
        lines.push("::1 localhost ip6-localhost".to_owned());
    }
    lines.push(format!("127.0.1.1 {hostname} {OURS}"));
    lines.join("\n") + "\n"
}

fn name_servers(servers: &[String]) -> io::Result<()> {
    let lines: String = servers.iter().map(|server| format!("nameserver {server}\n")).collect();
    write(Path::new("/etc/resolv.conf"), &lines)
}

fn write(place: &Path, text: &str) -> io::Result<()> {
    replace(place, text.as_bytes(), None)
}

/// Replaces a file, or a link that leads elsewhere. It gets owner and mode of `like`.
pub(crate) fn replace(place: &Path, content: &[u8], like: Option<&Metadata>) -> io::Result<()> {
    // A machine that only woke is who it was: reading is a tenth of the work.
    if like.is_none() && fs::read(place).is_ok_and(|now| now == content) {
        return Ok(());
    }
    let draft = place.with_extension("torpor");
    // Whatever lies there is a draft that was not finished.
    let _ = fs::remove_file(&draft);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&draft)?;
    if let Some(like) = like {
        fchown(&file, Some(like.uid()), Some(like.gid()))?;
    }
    let mode = like.map_or(0o644, |like| like.mode() & MODE_BITS);
    file.set_permissions(Permissions::from_mode(mode))?;
    let written = file.write_all(content);
    match written.and_then(|()| fs::rename(&draft, place)) {
        Ok(()) => Ok(()),
        // A file that is mounted can't be replaced, only rewritten.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            fs::remove_file(&draft)?;
            fs::write(place, content)
        }
        Err(error) => {
            let _ = fs::remove_file(&draft);
            Err(error)
        }
    }
}

/// Adds to the kernel's randomness, where it has any to add to.
fn stir(entropy: &str) {
    let random = OpenOptions::new().write(true).open("/dev/urandom");
    let _ = random.and_then(|mut random| random.write_all(entropy.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_uuid_names_a_boot() {
        assert!(is_uuid("0123abcd-89EF-4567-89ab-0123456789ab"));
        for wrong in [
            "",
            "0123abcd89ef456789ab0123456789ab",
            "0123abcd-89ef-4567-89ab-0123456789ag",
            "0123abcd-89ef-4567-89ab-0123456789ab-",
            "0123abcd-89ef-4567-89ab-0123456789ab\n",
        ] {
            assert!(!is_uuid(wrong), "{wrong}");
        }
    }

    #[test]
    fn the_hosts_file_names_the_machine_once() {
        let first = hosts("10.0.0.1 router\n", "one");
        let second = hosts(&first, "two");
        assert!(second.contains("10.0.0.1 router\n") && second.contains("127.0.0.1 localhost\n"));
        assert!(second.contains("127.0.1.1 two") && !second.contains("one"));
        assert_eq!(second.lines().count(), 4);
    }
}
