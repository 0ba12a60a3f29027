//! Passing bytes on, unread.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use torpor_protocol::egress::{EgressKind, Verdict};

use super::course::Step;
use super::{FIRST_MESSAGE, SPEAKS_SOON, settled, told};
use crate::glance::{Patience, Speech, glance};
use crate::policy::word;
use crate::rewound::Rewound;
use crate::turnstile::reset;
use crate::visit::{Told, Visit};

/// Bytes on their way, in each direction: as many as the kernel takes at once.
const BUFFER: usize = 64 * 1024;

/// Both ways, until both are at their end or the connection is cut. One that ends is shut, the other
/// goes on.
pub(super) async fn unread(visit: &Visit, mut guest: Rewound, mut world: TcpStream) {
    let copying = copy_bidirectional_with_sizes(&mut guest, &mut world, BUFFER, BUFFER);
    // However it ends, both are closed.
    if visit.cut().run_until_cancelled(copying).await.is_none() {
        cut(visit, guest.stream(), &world);
    }
}

/// The connection must end: both sides see that it did not end by itself.
fn cut(visit: &Visit, guest: &TcpStream, world: &TcpStream) {
    reset(guest);
    reset(world);
    if !visit.member.gone().is_cancelled() {
        visit.tell(Told::new(EgressKind::Tcp, Verdict::Denied, word::CHANGED));
    }
}

/// The same, for a guest that has not spoken yet: what it says first may still name a host, and that one
/// is decided about before a byte of it is passed on.
pub(super) async fn watched(visit: &Visit, guest: Rewound, world: TcpStream) {
    let (_, guest) = guest.into_parts();
    let (mut guest_says, mut guest_hears) = guest.into_split();
    let (mut world_says, mut world_hears) = world.into_split();
    let up = async {
        let first = first_words(visit, &mut guest_says).await?;
        carry(first, &mut guest_says, &mut world_hears).await
    };
    let down = carry(BytesMut::new(), &mut world_says, &mut guest_hears);
    let both = async { tokio::try_join!(up, down) };
    // However it ends, all halves are closed.
    if visit.cut().run_until_cancelled(both).await.is_none() {
        cut(visit, guest_says.as_ref(), world_says.as_ref());
    }
}

/// What the guest says first, if it may.
async fn first_words(visit: &Visit, guest: &mut OwnedReadHalf) -> io::Result<BytesMut> {
    let mut seen = BytesMut::new();
    let patience = Patience { first: None, vague: SPEAKS_SOON, whole: FIRST_MESSAGE };
    let speech = glance(guest, &mut seen, patience).await?;
    if speech.host().is_none() && !matches!(speech, Speech::Broken(_)) {
        return Ok(seen);
    }
    let course = settled(visit, &speech).await;
    let may = match course.step {
        Step::Pass { .. } => true,
        // It is too late to read it: it is connected. Where that matters, it is refused.
        Step::Read => !course.waits,
        Step::Deny => false,
    };
    if may {
        return Ok(seen);
    }
    visit.tell(told(&speech, Verdict::Denied, course.rule));
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
