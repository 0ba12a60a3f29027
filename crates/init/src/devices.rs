//! Finds devices by what the host says of them. Their numbers follow from the order in which the kernel
//! came across them, which is nobody's promise.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use crate::failure::Failure;

const SYS: &str = "/sys";
/// What the host calls the port that leads to it.
const PORT: &str = "agent";
const DISKS: [&str; 2] = ["vda", "vdb"];
/// How often to look whether a device is there.
const PAUSE: Duration = Duration::from_millis(2);
/// How often at most: half a minute and more, for an emulated machine on a busy host.
const LOOKS: u32 = 15_000;

/// The port that leads to the host, once it is there.
pub(crate) fn port() -> Result<PathBuf, Failure> {
    let found = wait_for(|| find_port(Path::new(SYS)));
    found.ok_or_else(|| Failure::new("there is no port to the host"))
}

fn find_port(sys: &Path) -> Option<PathBuf> {
    let ports = fs::read_dir(sys.join("class/virtio-ports")).ok()?;
    let ours = |port: &PathBuf| says(&port.join("name"), PORT);
    let port = ports.flatten().map(|entry| entry.path()).find(ours)?;
    Some(node(port.file_name()?.to_str()?))
}

/// The image and the disk, once they are there. The image is the one that can't be written: whatever a
/// guest writes to its disk, it does not become the image.
pub(crate) fn disks() -> Result<(PathBuf, PathBuf), Failure> {
    let found = wait_for(|| find_disks(Path::new(SYS)));
    found.ok_or_else(|| Failure::new("there is no image, or no disk"))
}

fn find_disks(sys: &Path) -> Option<(PathBuf, PathBuf)> {
    let disk = |read_only| {
        let is = |name: &&str| says(&sys.join("block").join(name).join("ro"), read_only);
        DISKS.into_iter().find(is).map(node)
    };
    Some((disk("1")?, disk("0")?))
}

fn says(file: &Path, text: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|said| said.trim_end() == text)
}

fn node(name: &str) -> PathBuf {
    Path::new("/dev").join(name)
}

fn wait_for<T>(mut find: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..LOOKS {
        if let Some(found) = find() {
            return Some(found);
        }
        sleep(PAUSE);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn devices_are_told_apart_by_what_the_host_says_and_not_by_number() {
        let sys = std::env::temp_dir().join(format!("torpor-init-sys-{}", std::process::id()));
        write(sys.join("block/vda/ro"), "0\n");
        let one = find_disks(&sys);
        write(sys.join("block/vdb/ro"), "1\n");
        let both = find_disks(&sys);
        write(sys.join("class/virtio-ports/vport2p1/name"), "other\n");
        let stranger = find_port(&sys);
        write(sys.join("class/virtio-ports/vport2p2/name"), "agent\n");
        let port = find_port(&sys);
        fs::remove_dir_all(&sys).unwrap();
        assert_eq!(one, None);
        assert_eq!(both, Some(("/dev/vdb".into(), "/dev/vda".into())));
        assert_eq!(stranger, None);
        assert_eq!(port, Some("/dev/vport2p2".into()));
    }
}
