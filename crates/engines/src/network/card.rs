//! Network cards of microVMs: devices through which a program sends and gets frames at the far end of
//! a slot.
//!
//! ```text
//!   guest 10.0.0.2 ══ QEMU ══ /dev/tapN ══ card3 ── far3 ┃ veth ┃ tpxxxxxx-3 ── nftables ── uplink
//!                                     parking namespace │ host
//! ```
//!
//! A card is a *macvtap* that has the far end for itself (mode passthru), so all that holds for the far
//! end and the host end holds for it: rules, lists, caps, their pace. It has no say in hardware
//! addresses: what arrives at the far end arrives at the card, whoever it is for.
//!
//! Invariants: a machine gets a card that nobody had before it; no slot is handed on with a card. An
//! open device whose card is gone is dead, so not even a program that nobody knows of is on a slot
//! that is handed on. A machine that lives on without its `Slot` keeps its card, as with packet sockets.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rtnetlink::packet_route::link::{LinkAttribute, MacVtapMode};
use rtnetlink::{LinkMacVtap, LinkUnspec, packet_core::ErrorMessage};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, makedev, mknodat, openat, statx,
};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use tokio::task::spawn_blocking;

use super::links::Links;
use super::names::{Block, card_link, far_index};
use super::{NetworkError, Slot};
use crate::directory::absent;

/// The group of cards that are removed, in the parking namespace, where no other link is in it.
const GONE: u32 = 1;
/// Longer than the numbers of any device.
const NUMBERS_BYTES: usize = 32;

/// Numbers of a device: major and minor.
pub(super) type Device = (u32, u32);

/// The device of a network card. It takes and gives one whole Ethernet frame at a time, each after a
/// header of 10 bytes (`struct virtio_net_hdr`; `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// Major and minor number, while the card is there.
    pub device: (u32, u32),
    /// Where it is. Who has it open elsewhere is seen if there is `tap` in the name.
    pub path: PathBuf,
}

impl Slot {
    /// A new network card for the guest, up, without any frame of earlier times. One that the slot had
    /// is gone with this, also for those who have it open.
    pub async fn tap(&self) -> Result<Tap, NetworkError> {
        let parking = self.shared.parking.lock().clone().ok_or(NetworkError::Closed)?;
        let index = self.shared.block.card_index(self.number);
        parking.links.renew_card(self.number, index).await?;
        let number = self.number;
        let node = spawn_blocking(move || {
            let device = parking.namespace.card_device(number, index)?;
            let path = node(index);
            place(&path, device)?;
            Ok(Tap { device, path })
        });
        let tap = node.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        tap.map_err(NetworkError::host("find the device of a network card"))
    }
}

impl Links {
    async fn renew_card(&self, slot: u16, index: u32) -> Result<(), NetworkError> {
        let add = || {
            let card =
                LinkMacVtap::new(&card_link(slot), far_index(slot), MacVtapMode::Passthrough);
            self.handle.link().add(card.index(index).up().build()).execute()
        };
        let made = match add().await {
            Err(rtnetlink::Error::NetlinkError(error)) if taken(&error) => {
                self.delete_cards(&[slot]).await?;
                add().await
            }
            made => made,
        };
        made.map_err(NetworkError::kernel("make a network card"))
    }

    /// Removes the cards of these slots, of which not all need have one; with them all their open
    /// devices die. The kernel needs 20 ms for one, and as long for all together.
    pub(super) async fn delete_cards(&self, slots: &[u16]) -> Result<(), NetworkError> {
        let failed = NetworkError::kernel("remove network cards");
        for slot in slots {
            // By name: the number is of the block that the installation had then.
            let mut message = LinkUnspec::new_with_name(&card_link(*slot)).build();
            message.attributes.push(LinkAttribute::Group(GONE));
            or_none(self.handle.link().set(message).execute().await).map_err(&failed)?;
        }
        let mut request = self.handle.link().del(0);
        request.message_mut().attributes.push(LinkAttribute::Group(GONE));
        or_none(request.execute().await).map_err(&failed)
    }
}

/// What is not there need not be changed.
fn or_none(done: Result<(), rtnetlink::Error>) -> Result<(), rtnetlink::Error> {
    match done {
        Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::ENODEV => Ok(()),
        done => done,
    }
}

/// Where the kernel puts the device of a card, on hosts where it makes devices.
fn node(index: u32) -> PathBuf {
    PathBuf::from(format!("/dev/tap{index}"))
}

/// Makes sure that a device is where it is looked for.
pub(super) fn place(path: &Path, device: Device) -> io::Result<()> {
    if character_device(path) == Some(device) {
        return Ok(());
    }
    // Of a card that is about to end, or that somebody removed whose kernel made no node.
    absent(fs::remove_file(path))?;
    let mode = Mode::RUSR | Mode::WUSR;
    let device = makedev(device.0, device.1);
    Ok(mknodat(CWD, path, FileType::CharacterDevice, mode, device)?)
}

/// The kernel removes what it made; this is for what `place` made. Only for cards that are gone.
pub(super) fn forget_nodes(block: Block, slots: impl IntoIterator<Item = u16>) -> io::Result<()> {
    slots.into_iter().try_for_each(|slot| absent(fs::remove_file(node(block.card_index(slot)))))
}

/// The name or the number is in use, or the far end has a card already.
fn taken(error: &ErrorMessage) -> bool {
    [libc::EEXIST, libc::EBUSY, libc::EINVAL].contains(&-error.raw_code())
}

/// What the kernel says of the links in the namespace of the calling thread. Mounted nowhere.
pub(super) fn about_links() -> io::Result<OwnedFd> {
    let sysfs = fsopen("sysfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&sysfs)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
    Ok(fsmount(&sysfs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// The numbers of a card's device.
pub(super) fn device(about: &OwnedFd, slot: u16, index: u32) -> io::Result<Device> {
    let file = format!("class/net/{}/tap{index}/dev", card_link(slot));
    let file = openat(about, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = [0; NUMBERS_BYTES];
    let length = rustix::io::read(&file, &mut text)?;
    parse(&text[..length]).ok_or_else(|| ErrorKind::InvalidData.into())
}

fn parse(numbers: &[u8]) -> Option<Device> {
    let (major, minor) = str::from_utf8(numbers).ok()?.trim_end().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The slots whose cards some process of this host has open.
pub(super) fn open_cards(cards: &BTreeMap<u16, Device>) -> io::Result<HashSet<u16>> {
    if cards.is_empty() {
        return Ok(HashSet::new());
    }
    let mut open = HashSet::new();
    for process in fs::read_dir("/proc")?.flatten() {
        if process.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit) {
            // One that ends meanwhile has nothing open.
            open.extend(open_taps(&process.path()).unwrap_or_default());
        }
    }
    Ok(cards.iter().filter(|(_, device)| open.contains(device)).map(|(slot, _)| *slot).collect())
}

/// Devices that a process has open, and that are called as taps are.
fn open_taps(process: &Path) -> io::Result<Vec<Device>> {
    let mut open = Vec::new();
    for file in fs::read_dir(process.join("fd"))?.flatten() {
        let file = file.path();
        // Only of these more is asked: a question about a file may wait for a distant server.
        let named = |target: PathBuf| {
            target.file_name().is_some_and(|name| name.to_string_lossy().contains("tap"))
        };
        if fs::read_link(&file).is_ok_and(named) {
            open.extend(character_device(&file));
        }
    }
    Ok(open)
}

fn character_device(file: &Path) -> Option<Device> {
    let about = statx(CWD, file, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
    let is = FileType::from_raw_mode(about.stx_mode.into()) == FileType::CharacterDevice;
    is.then_some((about.stx_rdev_major, about.stx_rdev_minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_a_device_are_read_and_nothing_else_is_taken_for_them() {
        assert_eq!(parse(b"246:1\n"), Some((246, 1)));
        for strange in [&b""[..], b"246", b"246:", b":1", b"-1:1", b"246:1:2", b"\xff:1"] {
            assert_eq!(parse(strange), None, "{strange:?}");
        }
    }

    #[test]
    fn a_device_that_a_process_has_open_is_found_by_its_numbers() {
        if !rustix::process::geteuid().is_root() {
            torpor_testkit::missing("devices need root");
            return;
        }
        // A device that does nothing: /dev/null.
        let (device, directory) = ((1, 3), tempfile::tempdir().expect("a directory"));
        let path = directory.path().join("taped");
        place(&path, device).expect("a device");
        // What has the name and is none.
        let _file = fs::File::create(directory.path().join("tape")).expect("a file");
        let cards = BTreeMap::from([(7, device), (8, (u32::MAX, 3))]);
        assert!(open_cards(&cards).expect("all processes").is_empty());
        let open = fs::File::open(&path).expect("opened");
        drop(directory);
        assert_eq!(open_cards(&cards).expect("all processes"), HashSet::from([7]));
        drop(open);
        assert!(open_cards(&cards).expect("all processes").is_empty());
    }
}
