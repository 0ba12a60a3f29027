//! Connections to servers inside that outlive the session they were made in.
//!
//! ```text
//!   stream 7 of a session ──┐ ended with it             ┌── stream 3 of a later one
//!                           └─ Kept: the socket, a task ┘
//! ```
//!
//! The task of a connection carries bytes for whichever stream it has now. While it has none it reads
//! nothing from the server, and writes what had arrived. What the two sides missed of each other when
//! a session ended is settled by [`Stream::take_over`]. A connection ends when both directions have
//! and the daemon has it all, when the socket breaks, when its stream is reset, when nobody asks for
//! it, or when the machine becomes somebody else.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::Shutdown;
use tokio::io::Interest;
use tokio::sync::Notify;
use torpor_protocol::guest::{Failure, FailureCode, KEPT_MAX, Reached, Reply};

use crate::agent::Agent;
use crate::descriptor::Descriptor;
use crate::failure::failure;
use crate::ports;
use crate::stream::{Closed, Input, Stream};

/// How often a connection without a stream looks whether it was asked for.
const TICK: Duration = Duration::from_secs(1);
/// Ticks until it is nobody's: a daemon that wants it asks as soon as it said hello. Counted instead of
/// measured, so that time during which the machine slept is none.
const TICKS_MAX: u32 = 60;
/// Longer than the tokens of any daemon.
const TOKEN_MAX: usize = 64;

/// All kept connections, by their tokens.
#[derive(Default)]
pub(crate) struct Table {
    kept: RefCell<HashMap<String, Rc<Kept>>>,
}

struct Kept {
    connection: Descriptor,
    /// Which it has now, or had last.
    stream: RefCell<Rc<Stream>>,
    attached: Notify,
    /// The server was told that the daemon sends no more.
    written: Cell<bool>,
    over: Cell<bool>,
    /// Rings when `written` or `over` changed.
    ending: Notify,
}

impl Table {
    /// None of them is wanted any more.
    pub(crate) fn clear(&self) {
        for (_, kept) in self.kept.borrow_mut().drain() {
            kept.end();
        }
    }

    fn insert(&self, token: String, kept: &Rc<Kept>) {
        // The same token again: the answer to the first request was lost.
        if let Some(before) = self.kept.borrow_mut().insert(token, kept.clone()) {
            before.end();
        }
    }

    fn remove(&self, kept: &Rc<Kept>) {
        self.kept.borrow_mut().retain(|_, found| !Rc::ptr_eq(found, kept));
    }
}

impl Kept {
    fn stream(&self) -> Rc<Stream> {
        self.stream.borrow().clone()
    }

    /// Waits until it has another stream than this one.
    async fn stream_after(&self, before: &Rc<Stream>) {
        while Rc::ptr_eq(&self.stream.borrow(), before) {
            self.attached.notified().await;
        }
    }

    fn attach(&self, stream: &Rc<Stream>) {
        self.stream.replace(stream.clone());
        // After a revival the kernel may tell nothing of the socket.
        self.connection.assume_ready(Interest::READABLE);
        self.connection.assume_ready(Interest::WRITABLE);
        self.attached.notify_waiters();
    }

    fn end(&self) {
        self.over.set(true);
        self.ending.notify_waiters();
    }

    /// Waits until it is over.
    async fn over(&self) {
        while !self.over.get() {
            self.ending.notified().await;
        }
    }
}

/// A connection that is kept.
pub(crate) async fn keep(
    agent: &Rc<Agent>,
    stream: &Rc<Stream>,
    port: u16,
    token: String,
) -> Result<(), Failure> {
    if token.is_empty() || token.len() > TOKEN_MAX {
        return Err(failure(FailureCode::Invalid, "that is no token"));
    }
    let connection = ports::reach(port).await?;
    if agent.kept.kept.borrow().len() >= KEPT_MAX {
        let message = format!("{KEPT_MAX} connections are kept already");
        return Err(failure(FailureCode::Limit, message));
    }
    stream.keep();
    let kept = Rc::new(Kept {
        connection,
        stream: RefCell::new(stream.clone()),
        attached: Notify::new(),
        written: Cell::new(false),
        over: Cell::new(false),
        ending: Notify::new(),
    });
    agent.kept.insert(token, &kept);
    tokio::task::spawn_local(live(agent.clone(), kept.clone()));
    kept.over().await;
    Ok(())
}

/// Goes on with one on this stream.
pub(crate) async fn resume(
    agent: &Rc<Agent>,
    stream: &Rc<Stream>,
    token: &str,
    reached: Reached,
) -> Result<(), Failure> {
    let gone = || failure(FailureCode::NotListening, "that connection is over");
    let kept = agent.kept.kept.borrow().get(token).cloned().ok_or_else(gone)?;
    let before = kept.stream();
    if before.closed_because() == Some(Closed::Reset) {
        return Err(gone());
    }
    before.close(Closed::Forgotten);
    if !stream.take_over(&before, reached, || kept.attach(stream)).await {
        kept.end();
        return Err(gone());
    }
    kept.over().await;
    Ok(())
}

/// Carries bytes until it is over.
async fn live(agent: Rc<Agent>, kept: Rc<Kept>) {
    let first = kept.stream();
    tokio::select! {
        biased;
        () = first.closed() => {}
        () = first.reply(&Reply::Done) => {}
    }
    let broken = tokio::select! {
        biased;
        () = kept.over() => false,
        () = unwanted(&kept) => false,
        done = both_ways(&kept) => done.is_err(),
    };
    agent.kept.remove(&kept);
    let stream = kept.stream();
    if broken && stream.closed_because().is_none() {
        tokio::select! {
            biased;
            () = stream.closed() => {}
            () = stream.abort() => {}
        }
    }
    kept.end();
}

/// Until both directions ended and the daemon has it all.
async fn both_ways(kept: &Kept) -> io::Result<()> {
    let inward = async {
        carry(kept).await?;
        kept.written.set(true);
        kept.ending.notify_waiters();
        std::future::pending().await
    };
    tokio::select! {
        done = inward => done,
        done = bring(kept) => done,
    }
}

/// From the daemon to the server, until its end.
async fn carry(kept: &Kept) -> io::Result<()> {
    loop {
        let stream = kept.stream();
        match stream.receive_to_the_last().await {
            Input::Bytes(bytes) => kept.connection.write_all(&bytes).await?,
            Input::End => {
                rustix::net::shutdown(kept.connection.get_ref(), Shutdown::Write)?;
                return Ok(());
            }
            Input::Closed => kept.stream_after(&stream).await,
        }
    }
}

/// From the server to the daemon; the end is told to each stream.
async fn bring(kept: &Kept) -> io::Result<()> {
    loop {
        let stream = kept.stream();
        let all = async {
            stream.send_again().await;
            ports::bring(&stream, &kept.connection).await?;
            stream.confirmed().await;
            while !kept.written.get() {
                kept.ending.notified().await;
            }
            Ok(())
        };
        tokio::select! {
            biased;
            () = stream.closed() => {}
            done = all => return done,
        }
        kept.stream_after(&stream).await;
    }
}

/// Resolves when its stream was reset, or nobody asked for it for long.
async fn unwanted(kept: &Kept) {
    loop {
        let stream = kept.stream();
        stream.closed().await;
        if stream.closed_because() == Some(Closed::Reset) {
            return;
        }
        for tick in 1.. {
            let elsewhere = tokio::time::timeout(TICK, kept.stream_after(&stream)).await.is_ok();
            if elsewhere {
                break;
            }
            if tick >= TICKS_MAX {
                return;
            }
        }
    }
}
