//! Messages to and from the kernel's packet filter, by hand: what is read is never believed to be as
//! long as it says.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink, socket_with};

// Numbers of the kernel's interface: linux/netlink.h and nfnetlink.h.
const HEADER: usize = 16;
/// Where the attributes of a message begin.
const ENTRY_HEADER: usize = HEADER + 4;
pub(super) const REQUEST: u16 = 1;
pub(super) const ACK: u16 = 4;
pub(super) const ERROR: u16 = 2;
pub(super) const DONE: u16 = 3;
pub(super) const NESTED: u16 = 1 << 15;

pub(super) fn open(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    let protocol = Some(netlink::NETFILTER);
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?)
}

/// `resource` is a number that some kinds of messages are about.
pub(super) fn message(kind: u16, flags: u16, resource: u16, attributes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(ENTRY_HEADER + attributes.len()).expect("a short message");
    let mut message = Vec::with_capacity(ENTRY_HEADER + attributes.len());
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // Sequence and sender; then family, version and resource.
    message.extend([0; 8]);
    message.extend([AddressFamily::INET.as_raw().to_ne_bytes()[0], 0]);
    message.extend(resource.to_be_bytes());
    message.extend(attributes);
    message
}

pub(super) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).expect("a short attribute");
    let mut attribute = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    attribute.extend(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// Kind and whole text of each message.
pub(super) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        let length = usize::try_from(length).ok().filter(|length| *length >= HEADER)?;
        let message = bytes.get(..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(message.get(4..6)?.try_into().ok()?), message))
    })
}

/// The attributes of a message.
pub(super) fn attributes(message: &[u8]) -> &[u8] {
    message.get(ENTRY_HEADER..).unwrap_or_default()
}

/// The value of the first attribute of a kind.
pub(super) fn find(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & !NESTED;
        let value = bytes.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

/// An acknowledgement is an error message with the number zero.
pub(super) fn result_of(message: &[u8]) -> io::Result<()> {
    let code = message.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok());
    match code.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        None => Err(ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_messages_end_the_reading_and_nothing_else() {
        assert_eq!(messages(&[]).count(), 0);
        assert_eq!(messages(&[3, 0, 0, 0]).count(), 0, "shorter than its own header");
        assert_eq!(messages(&[0xff; 40]).count(), 0, "longer than what is there");
        assert_eq!(find(&[2, 0, 1, 0], 1), None);
        assert_eq!(find(&[9, 0, 2, 0, 1], 1), None);
        assert_eq!(attributes(&[0; 7]), [0; 0]);
        assert!(result_of(&[0; 3]).is_err());
        let mut worst = [0; HEADER + 4];
        worst[HEADER..].copy_from_slice(&i32::MIN.to_ne_bytes());
        assert!(result_of(&worst).is_err());
    }

    #[test]
    fn what_is_written_can_be_read() {
        let all = [attribute(7, b"odd"), attribute(3 | NESTED, b"value")].concat();
        let message = message(513, REQUEST, 9, &all);
        let (kind, read) = messages(&message).next().expect("one message");
        assert_eq!((kind, read.len()), (513, message.len()));
        assert_eq!(find(attributes(read), 3), Some(&b"value"[..]));
        assert_eq!(find(attributes(read), 4), None);
    }
}
