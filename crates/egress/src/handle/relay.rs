//! Relaying bytes, unchanged.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use torpor_protocol::egress::{EgressKind, Verdict};

use super::plan::Action;
use super::{FIRST_MESSAGE, SPEAKS_SOON, outcome, settled};
use crate::connection::{Connection, Outcome};
use crate::listener::reset;
use crate::policy::word;
use crate::rewind::Rewind;
use crate::sniff::{Protocol, Timeouts, sniff};

/// Bytes on their way, in each direction: as many as the kernel takes at once.
const BUFFER: usize = 64 * 1024;

/// Both ways, until both are at their end or the connection is cut. One that ends is shut, the other
/// goes on.
pub(super) async fn both_ways(connection: &Connection, mut guest: Rewind, mut world: TcpStream) {
    let copying = copy_bidirectional_with_sizes(&mut guest, &mut world, BUFFER, BUFFER);
    // However it ends, both are closed.
    if connection.cut().run_until_cancelled(copying).await.is_none() {
        cut(connection, guest.stream(), &world);
    }
}

/// The connection must end: both sides see that it did not end by itself.
fn cut(connection: &Connection, guest: &TcpStream, world: &TcpStream) {
    reset(guest);
    reset(world);
    if !connection.guest.gone().is_cancelled() {
        connection.record(Outcome::new(EgressKind::Tcp, Verdict::Denied, word::CHANGED));
    }
}

/// The same, for a guest that has not spoken yet: what it says first may still name a host, and that one
/// is decided about before a byte of it is passed on.
pub(super) async fn watched(connection: &Connection, guest: Rewind, world: TcpStream) {
    let (_, guest) = guest.into_parts();
    let (mut guest_says, mut guest_hears) = guest.into_split();
    let (mut world_says, mut world_hears) = world.into_split();
    let up = async {
        let first = first_words(connection, &mut guest_says).await?;
        carry(first, &mut guest_says, &mut world_hears).await
    };
    let down = carry(BytesMut::new(), &mut world_says, &mut guest_hears);
    let both = async { tokio::try_join!(up, down) };
    // However it ends, all halves are closed.
    if connection.cut().run_until_cancelled(both).await.is_none() {
        cut(connection, guest_says.as_ref(), world_says.as_ref());
    }
}

/// What the guest says first, if it may.
async fn first_words(connection: &Connection, guest: &mut OwnedReadHalf) -> io::Result<BytesMut> {
    let mut seen = BytesMut::new();
    let timeouts = Timeouts { first: None, vague: SPEAKS_SOON, whole: FIRST_MESSAGE };
    let protocol = sniff(guest, &mut seen, timeouts).await?;
    if protocol.host().is_none() && !matches!(protocol, Protocol::Broken(_)) {
        return Ok(seen);
    }
    let plan = settled(connection, &protocol).await;
    let may = match plan.action {
        Action::Pass { .. } => true,
        // It is too late to intercept it: it is connected. Where that matters, it is refused.
        Action::Intercept => !plan.waits,
        Action::Deny => false,
    };
    if may {
        return Ok(seen);
    }
    connection.record(outcome(&protocol, Verdict::Denied, plan.rule));
    reset(guest.as_ref());
    Err(io::ErrorKind::PermissionDenied.into())
}

/// `first` and then all that is said.
async fn carry(
    first: BytesMut,
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
) -> io::Result<()> {
    to.write_all(&first).await?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..count]).await?;
    }
}
