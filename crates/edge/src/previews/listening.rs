//! Which ports something listens on inside a sandbox, for people whose preview finds nobody. What the
//! guest says is read within limits and believed as far as a hint goes.

use std::collections::BTreeSet;
use std::time::Duration;

use torpor_lifecycle::Lease;
use torpor_lifecycle::guest::GuestError;
use torpor_protocol::guest::{Reply, Request};

/// How long the guest may take to say it.
const DEADLINE: Duration = Duration::from_secs(2);
/// How much of each table is read: a line has 150 bytes, and who has more than a thousand sockets is
/// not helped by a list of them.
const TABLE_MAX: u64 = 256 * 1024;
/// Ports that are named.
const PORTS_MAX: usize = 20;
/// The state of a socket that listens, as the kernel writes it.
const LISTEN: &str = "0A";

/// Sorted; empty if nobody listens, or the guest does not say.
pub(super) async fn ports(lease: &Lease) -> Vec<u16> {
    let both = async {
        let (old, new) =
            tokio::join!(table(lease, "/proc/net/tcp"), table(lease, "/proc/net/tcp6"));
        let texts = [old.unwrap_or_default(), new.unwrap_or_default()];
        let ports: BTreeSet<_> =
            texts.iter().flat_map(|text| text.lines()).filter_map(port).collect();
        ports.into_iter().take(PORTS_MAX).collect()
    };
    tokio::time::timeout(DEADLINE, both).await.unwrap_or_default()
}

async fn table(lease: &Lease, path: &str) -> Result<String, GuestError> {
    let request = Request::ReadFile { path: path.to_owned(), offset: 0, length: Some(TABLE_MAX) };
    let mut stream = lease.guest().open(&request).await?;
    let reply = stream.reply().await?;
    if !matches!(reply, Reply::Stat(_)) {
        return Err(torpor_lifecycle::guest::unexpected(&request));
    }
    let mut text = Vec::new();
    while let Some(bytes) = stream.data().await? {
        text.extend_from_slice(&bytes);
        if text.len() as u64 > TABLE_MAX {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The port of a line of the table, if something listens on it.
fn port(line: &str) -> Option<u16> {
    let mut words = line.split_ascii_whitespace();
    let (_, own, _, state) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let (_, port) = own.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    (state == LISTEN && port != 0).then_some(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_that_listen_are_named() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n\
            \x20  0: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000\n\
            \x20  1: 0100007F:1F90 0100007F:A000 01 00000000:00000000 00:00000000 00000000\n\
            \x20  2: 00000000000000000000000001000000:1538 0:0 0A x\n";
        assert_eq!(table.lines().filter_map(port).collect::<Vec<_>>(), [3000, 5432]);
    }

    #[test]
    fn nonsense_of_a_guest_is_nothing() {
        for line in ["", "0: x 0A", "a b c 0A", "a :FFFFF c 0A", "a :0000 c 0A", "a :\u{fc} c 0A"] {
            assert_eq!(port(line), None, "{line:?}");
        }
    }
}
