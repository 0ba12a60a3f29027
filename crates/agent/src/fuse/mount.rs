//! One mount: its device, and the tasks that live as long as it.

use std::cell::{Cell, RefCell};
use std::ffi::CString;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use tokio::io::Interest;
use tokio::sync::Notify;
use torpor_protocol::guest::files::DATA_MAX;

use super::abi::{self, REQUEST_MAX};
use super::requests::Outcome;
use super::state::State;
use crate::descriptor::{Descriptor, watched};

/// How soon a lock that is not free is asked for again; the pause grows up to the second.
const LOCK_PAUSE: Duration = Duration::from_millis(1);
const LOCK_PAUSE_MAX: Duration = Duration::from_millis(50);
/// Requests taken in a row before others have their turn.
const REQUESTS_IN_A_ROW: u32 = 16;

pub(super) struct Mount {
    pub(super) path: PathBuf,
    /// Others change these files too, as whoever serves it said last.
    pub(super) shared: Cell<bool>,
    device: Descriptor,
    pub(super) state: RefCell<State>,
    /// The root is known.
    pub(super) ready: Notify,
    /// There is something to send.
    pub(super) calls: Notify,
    /// There is room for requests again.
    pub(super) room: Notify,
    /// Somebody waits for a lock.
    pub(super) locking: Notify,
    /// Which stream serves it: a number for each, nothing while there is none.
    pub(super) stream: Cell<Option<u64>>,
    /// How many there were.
    pub(super) streams: Cell<u64>,
    /// Rings when that changed.
    pub(super) changed: Notify,
    ended: Cell<bool>,
    /// The thread that must not wait for somebody who may wait for it.
    agent: u32,
}

impl Mount {
    /// Around a mounted device; on the thread that serves it.
    pub(super) fn new(
        path: PathBuf,
        shared: bool,
        device: OwnedFd,
        agent: u32,
    ) -> io::Result<Rc<Self>> {
        let mount = Rc::new(Self {
            path,
            shared: Cell::new(shared),
            device: watched(device, Interest::READABLE)?,
            state: RefCell::default(),
            ready: Notify::new(),
            calls: Notify::new(),
            room: Notify::new(),
            locking: Notify::new(),
            stream: Cell::new(None),
            streams: Cell::new(0),
            changed: Notify::new(),
            ended: Cell::new(false),
            agent,
        });
        tokio::task::spawn_local(Rc::clone(&mount).live());
        Ok(mount)
    }

    /// Takes requests until it is unmounted.
    async fn live(self: Rc<Self>) {
        let locks = async {
            loop {
                self.ask_for_locks().await;
            }
        };
        tokio::select! {
            () = self.take_requests() => {}
            () = locks => {}
            () = self.ended() => {}
        }
    }

    async fn ended(&self) {
        while !self.ended.get() {
            self.changed.notified().await;
        }
    }

    async fn take_requests(&self) {
        while !self.state.borrow().nodes.has_root() {
            self.ready.notified().await;
        }
        let mut buffer = vec![0; REQUEST_MAX];
        let mut row = 0;
        loop {
            while !self.state.borrow().has_room() {
                self.room.notified().await;
            }
            let read = |device: &OwnedFd| Ok(rustix::io::read(device, &mut *buffer)?);
            match self.device.async_io(Interest::READABLE, read).await {
                Ok(length) => self.take(&buffer[..length]),
                // The request was taken back.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
                // Unmounted.
                Err(_) => return,
            }
            row += 1;
            if row % REQUESTS_IN_A_ROW == 0 {
                tokio::task::yield_now().await;
            }
        }
    }

    fn take(&self, bytes: &[u8]) {
        let Ok((header, mut body)) = abi::request(bytes) else { return };
        let state = &mut *self.state.borrow_mut();
        if header.pid == self.agent && self.stream.get().is_none() && header.unique != 0 {
            // Whoever would serve this mount may wait for the one who asks.
            let expects = |it| !matches!(it, abi::Operation::Forget | abi::Operation::BatchForget);
            if header.operation.is_some_and(expects)
                && header.operation != Some(abi::Operation::Init)
            {
                return self.reply(header.unique, Err(Errno::IO), &[]);
            }
        }
        match self.handle(state, header, &mut body) {
            Ok(Outcome::Reply(out)) => self.reply(header.unique, Ok(()), &[&out.0]),
            Ok(Outcome::Later | Outcome::Silence) => {}
            Err(errno) => self.reply(header.unique, Err(errno), &[]),
        }
        if !state.queue.is_empty() {
            self.calls.notify_one();
        }
    }

    /// Tells the kernel.
    pub(super) fn reply(&self, unique: u64, result: Result<(), Errno>, content: &[&[u8]]) {
        let length = 16 + content.iter().map(|part| part.len()).sum::<usize>();
        let mut header = [0; 16];
        header[..4].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
        let errno = result.err().map_or(0, |errno| -errno.raw_os_error());
        header[4..8].copy_from_slice(&errno.to_ne_bytes());
        header[8..].copy_from_slice(&unique.to_ne_bytes());
        let mut parts = vec![IoSlice::new(&header)];
        parts.extend(content.iter().filter(|part| !part.is_empty()).map(|part| IoSlice::new(part)));
        // It never waits. A reply that the kernel does not take is for somebody who is gone, unless it does not
        // understand it: then whoever waits gets an error.
        let replied = rustix::io::writev(self.device.get_ref(), &parts);
        if replied == Err(Errno::INVAL) && result.is_ok() {
            self.reply(unique, Err(Errno::IO), &[]);
        }
    }

    /// Asks again for locks that are not free, while anybody waits for one.
    async fn ask_for_locks(&self) {
        let mut pause = LOCK_PAUSE;
        self.locking.notified().await;
        while self.state.borrow().locks.anybody_waits() {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOCK_PAUSE_MAX);
            Self::try_locks(&mut self.state.borrow_mut());
            self.calls.notify_one();
            // Their answers.
            let _ = tokio::time::timeout(LOCK_PAUSE_MAX, self.locking.notified()).await;
        }
    }

    /// It is unmounted: whoever serves it stops, and the device is closed with the last who holds this.
    pub(super) fn end(&self) {
        self.ended.set(true);
        self.stream.set(None);
        self.changed.notify_waiters();
    }

    /// The agent itself must answer a daemon that is new: what it waits for here fails.
    pub(super) fn fail_agent(&self) {
        let theirs = self.state.borrow_mut().give_up(self.agent);
        for unique in theirs {
            self.reply(unique, Err(Errno::IO), &[]);
        }
    }
}

/// Opens a device and mounts it. Blocks: the path may lead through another mount of ours.
pub(super) fn mount(path: &Path, read_only: bool) -> io::Result<OwnedFd> {
    std::fs::create_dir_all(path)?;
    let device = open_device()?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read={DATA_MAX}",
        device.as_raw_fd()
    );
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if read_only {
        flags |= MountFlags::RDONLY;
    }
    let options = CString::new(options)?;
    rustix::mount::mount("torpor", path, "fuse.torpor", flags, options.as_c_str())?;
    Ok(device)
}

/// The kernel's end of a mount. A machine has no `/dev/fuse` for others: the agent makes one for the moment.
fn open_device() -> io::Result<OwnedFd> {
    const OWN: &str = "/dev/.fuse";
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open("/dev/fuse", flags, Mode::empty()) {
        Err(Errno::NOENT) => {}
        opened => return Ok(opened?),
    }
    let (mode, number) = (Mode::RUSR | Mode::WUSR, rustix::fs::makedev(10, 229));
    match rustix::fs::mknodat(CWD, OWN, FileType::CharacterDevice, mode, number) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let opened = rustix::fs::open(OWN, flags, Mode::empty());
    rustix::fs::unlink(OWN)?;
    Ok(opened?)
}
