//! Descriptors that the agent waits for.
//!
//! The runtime tells descriptors apart by addresses of its own memory, which it gives to the kernel.
//! gVisor, when it revives a machine, reports descriptors once more that were taken off the list
//! before; the runtime would follow addresses where something else lives by now. So whatever comes
//! and goes is on a list of our own, under numbers that are never used twice, and a number that
//! nobody knows is ignored. The runtime watches this list as a whole, and what lives as long as it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

/// Events taken from the list at once.
const EVENTS: usize = 256;

thread_local! {
    static LIST: RefCell<Option<Rc<List>>> = const { RefCell::new(None) };
}

/// The list of this thread.
struct List {
    kernel: AsyncFd<OwnedFd>,
    watched: RefCell<HashMap<u64, Rc<Readiness>>>,
    next: Cell<u64>,
}

#[derive(Default)]
struct Readiness {
    readable: Cell<bool>,
    writable: Cell<bool>,
    changed: Notify,
}

/// Makes this thread's list and a task that reads it; before anything is watched.
pub(crate) fn begin() -> io::Result<()> {
    let kernel = watched_for_good(epoll::create(CreateFlags::CLOEXEC)?, Interest::READABLE)?;
    let list = Rc::new(List { kernel, watched: RefCell::new(HashMap::new()), next: Cell::new(0) });
    LIST.set(Some(list.clone()));
    tokio::task::spawn_local(async move { list.read().await });
    Ok(())
}

/// Gives the list back, while the runtime is still there.
pub(crate) fn end() {
    LIST.set(None);
}

/// Makes the descriptor not block, and the runtime watch it until the runtime ends. For what lives
/// as long as the agent only.
#[expect(unsafe_code, reason = "the runtime has to trust the type to keep its descriptor open")]
pub(crate) fn watched_for_good(
    descriptor: OwnedFd,
    interest: Interest,
) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&descriptor, true)?;
    // SAFETY: an `OwnedFd` has one descriptor for its whole life and closes it only when dropped,
    // which `AsyncFd` does after it let go of it.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, interest) }?)
}

/// Makes the descriptor not block, and puts it on the list.
pub(crate) fn watched(descriptor: OwnedFd, interest: Interest) -> io::Result<Descriptor> {
    rustix::io::ioctl_fionbio(&descriptor, true)?;
    let list = LIST.with_borrow(Clone::clone).ok_or(io::ErrorKind::NotConnected)?;
    let number = list.next.replace(list.next.get() + 1);
    let readiness = Rc::new(Readiness::default());
    let mut flags = EventFlags::empty();
    if interest.is_readable() {
        flags |= EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        if interest.is_writable() {
            flags |= EventFlags::OUT;
        }
    } else {
        // Watched only while it is full: else everything that is taken out of it wakes the agent.
        flags |= EventFlags::ONESHOT;
        readiness.writable.set(true);
    }
    epoll::add(list.kernel.get_ref(), &descriptor, EventData::new_u64(number), flags)?;
    list.watched.borrow_mut().insert(number, readiness.clone());
    Ok(Descriptor { descriptor, number, writes_only: !interest.is_readable(), readiness, list })
}

impl List {
    async fn read(&self) {
        let mut events = Vec::with_capacity(EVENTS);
        while let Ok(mut ready) = self.kernel.readable().await {
            events.clear();
            let now = Some(&Timespec { tv_sec: 0, tv_nsec: 0 });
            let waited = epoll::wait(self.kernel.get_ref(), spare_capacity(&mut events), now);
            // Broken off, it took nothing away, and the runtime would not be told of it again.
            if waited != Err(Errno::INTR) && events.len() < EVENTS {
                ready.clear_ready();
            }
            for event in &events {
                self.note(event.data.u64(), event.flags);
            }
        }
    }

    fn note(&self, number: u64, flags: EventFlags) {
        let Some(readiness) = self.watched.borrow().get(&number).cloned() else { return };
        let broken = EventFlags::HUP | EventFlags::ERR;
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | broken) {
            readiness.readable.set(true);
        }
        if flags.intersects(EventFlags::OUT | broken) {
            readiness.writable.set(true);
        }
        readiness.changed.notify_waiters();
    }
}

/// A pipe's end, socket, terminal or the like that never blocks.
pub(crate) struct Descriptor {
    descriptor: OwnedFd,
    number: u64,
    writes_only: bool,
    readiness: Rc<Readiness>,
    list: Rc<List>,
}

impl Descriptor {
    pub(crate) fn get_ref(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// Waits until it is worth trying.
    pub(crate) async fn ready(&self, interest: Interest) -> io::Result<()> {
        // However much there is to do here, others have their turn.
        tokio::task::consume_budget().await;
        while !self.is_ready(interest).get() {
            if self.writes_only {
                let flags = EventFlags::OUT | EventFlags::ONESHOT;
                let data = EventData::new_u64(self.number);
                epoll::modify(self.list.kernel.get_ref(), &self.descriptor, data, flags)?;
            }
            self.readiness.changed.notified().await;
        }
        Ok(())
    }

    /// Waits until the kernel tells of it next.
    pub(crate) async fn next(&self, interest: Interest) -> io::Result<()> {
        self.ready(interest).await?;
        self.is_ready(interest).set(false);
        Ok(())
    }

    /// The next attempt is made whatever the kernel tells: after a revival it may tell nothing.
    pub(crate) fn assume_ready(&self, interest: Interest) {
        self.is_ready(interest).set(true);
        self.readiness.changed.notify_waiters();
    }

    /// Tries once; notes when there was nothing to be done.
    pub(crate) fn try_io<T>(
        &self,
        interest: Interest,
        operation: impl FnOnce(&OwnedFd) -> io::Result<T>,
    ) -> io::Result<T> {
        let done = operation(&self.descriptor);
        if done.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.is_ready(interest).set(false);
        }
        done
    }

    /// Tries until it could be done.
    pub(crate) async fn async_io<T>(
        &self,
        interest: Interest,
        mut operation: impl FnMut(&OwnedFd) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            self.ready(interest).await?;
            match self.try_io(interest, &mut operation) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    /// Writes all of it, however long the other side takes to read.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let write = |descriptor: &OwnedFd| Ok(rustix::io::write(descriptor, bytes)?);
            let written = self.async_io(Interest::WRITABLE, write).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    fn is_ready(&self, interest: Interest) -> &Cell<bool> {
        if interest.is_readable() { &self.readiness.readable } else { &self.readiness.writable }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.list.watched.borrow_mut().remove(&self.number);
        // Closing would do it too, unless a child holds the same file.
        let _ = epoll::delete(self.list.kernel.get_ref(), &self.descriptor);
    }
}
