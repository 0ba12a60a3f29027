//! Processes: started by request, owned by the table, minded by one task each.
//!
//! ```text
//!            spawn            reaped            output read or quiet
//!   (asked) ──────▶ running ─────────▶ draining ─────────▶ ended ──▶ forgotten
//!                      ▲                                     │
//!                      └────────── restart, after a pause ───┘   (supervised ones)
//! ```
//!
//! A supervised process is one [`Process`] for all its lives: same name, same output, another pid. One
//! that is looked at and not well is killed, and then ended like any other.

mod attach;
mod bystander;
mod child;
mod health;
mod life;
mod lines;
mod orders;
mod output;
mod reap;
mod spawn;
mod supervise;
mod table;
mod tree;
pub(crate) mod user;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::WaitStatus;
use tokio::sync::Notify;
use torpor_protocol::guest::{
    Exit, HealthReport, HealthState, LastExit, ProcessSpec, ProcessStatus, TerminalSize,
};

pub(crate) use attach::{Show, attach, run, write_stdin};
pub(crate) use bystander::Bystander;
pub(crate) use life::start;
pub(crate) use lines::{Lines, send_lines};
pub(crate) use orders::{kill, list, resize, restart, signal};
pub(crate) use reap::{Reaper, kill_all};
pub(crate) use spawn::PATH;
pub(crate) use table::Table;

use crate::descriptor::Descriptor;
use lines::Speaker;
use output::Output;
use supervise::Restarts;

/// Bytes of the command that a status shows; a list of many has to fit into packets.
const COMMAND_SHOWN: usize = 4096;
/// How far output may run ahead of the stream that slows its process down. Half of what is kept, so
/// that such a stream never misses a byte.
const AHEAD_MAX: usize = output::KEPT / 2;

pub(crate) struct Process {
    pub(crate) spec: ProcessSpec,
    state: RefCell<State>,
    output: RefCell<Output>,
    lines: Rc<Lines>,
    /// Who says its lines in this life; nobody in a terminal.
    speaker: RefCell<Option<Rc<Speaker>>>,
    /// Something changed: output, exit, an order, a reader that caught up.
    changed: Notify,
    stdin: RefCell<Option<Rc<Descriptor>>>,
    terminal: RefCell<Option<Rc<Descriptor>>>,
    terminal_size: Cell<Option<TerminalSize>>,
    /// How far the stream has read that slows the process down.
    slowed_by: Cell<Option<u64>>,
}

#[derive(Default)]
struct State {
    pid: u32,
    /// Counts its lives.
    life: u64,
    started_at_ms: u64,
    /// As soon as the kernel said so; the exit follows when the output is read.
    reaped: Option<WaitStatus>,
    exit: Option<Exit>,
    ended_at_ms: Option<u64>,
    next_start_at_ms: Option<u64>,
    restarts: Restarts,
    restarts_shown: u32,
    order: Option<Order>,
    /// What looks at this life say, if it is looked at.
    health: Option<HealthReport>,
    /// It ended for good and is kept for inspection only.
    retired: bool,
    /// How the life before looked at its end, for streams that were attached to it.
    last: Option<Rc<Ended>>,
    /// How the life before this one ended.
    last_exit: Option<LastExit>,
}

struct Ended {
    status: ProcessStatus,
    output_end: u64,
}

/// What somebody wants to happen after the process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Stay,
    Again,
}

impl Process {
    fn new(spec: ProcessSpec, lines: Rc<Lines>) -> Self {
        Self {
            terminal_size: Cell::new(spec.terminal),
            spec,
            state: RefCell::default(),
            output: RefCell::default(),
            lines,
            speaker: RefCell::default(),
            changed: Notify::new(),
            stdin: RefCell::default(),
            terminal: RefCell::default(),
            slowed_by: Cell::new(None),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.state.borrow().pid
    }

    fn name(&self) -> Option<&str> {
        self.spec.supervise.as_ref()?.name.as_deref()
    }

    /// The kernel still knows it under its pid.
    fn alive(&self) -> bool {
        let state = self.state.borrow();
        state.reaped.is_none() && state.exit.is_none()
    }

    fn ended(&self) -> bool {
        self.state.borrow().exit.is_some()
    }

    fn retired(&self) -> bool {
        self.state.borrow().retired
    }

    /// Whether it ended, or ends, because it was not well.
    fn unhealthy(&self) -> bool {
        self.state.borrow().health.is_some_and(|health| health.state == HealthState::Unhealthy)
    }

    fn life(&self) -> u64 {
        self.state.borrow().life
    }

    /// How the given life ended, once it has.
    fn ended_life(&self, life: u64) -> Option<Rc<Ended>> {
        let state = self.state.borrow();
        (state.life > life || state.exit.is_some()).then(|| state.last.clone()).flatten()
    }

    fn order(&self, order: Order) {
        self.state.borrow_mut().order = Some(order);
        self.changed.notify_waiters();
    }

    /// A new life begins.
    fn begin(&self, spawned: spawn::Spawned) -> spawn::Outlets {
        let mut state = self.state.borrow_mut();
        if let (Some(exit), Some(at_ms)) = (state.exit, state.ended_at_ms) {
            state.last_exit = Some(LastExit { exit, at_ms });
        }
        state.pid = spawned.pid;
        state.life += 1;
        state.started_at_ms = spawned.started_at_ms;
        state.reaped = None;
        state.exit = None;
        state.ended_at_ms = None;
        state.next_start_at_ms = None;
        state.order = None;
        state.retired = false;
        let looked_at = self.spec.supervise.as_ref().is_some_and(|it| it.health.is_some());
        state.health = looked_at.then_some(health::STARTING);
        if self.spec.terminal.is_none() {
            let program = self.spec.command.first().map_or("", String::as_str);
            let speaker = Speaker::new(state.pid, state.started_at_ms, program, self.name());
            *self.speaker.borrow_mut() = Some(Rc::new(speaker));
        }
        *self.stdin.borrow_mut() = spawned.stdin;
        *self.terminal.borrow_mut() = spawned.terminal;
        self.changed.notify_waiters();
        spawned.outlets
    }

    fn reaped(&self, status: WaitStatus) {
        self.state.borrow_mut().reaped = Some(status);
        self.changed.notify_waiters();
    }

    /// A life ends: it was reaped, and its output is read as far as it will be.
    fn end(&self, exit: Exit) {
        self.stdin.take();
        self.terminal.take();
        self.output.borrow_mut().shrink();
        self.fall_silent();
        {
            let mut state = self.state.borrow_mut();
            state.exit = Some(exit);
            state.ended_at_ms = Some(now_ms());
        }
        let ended = Ended { status: self.status(), output_end: self.output.borrow().end() };
        self.state.borrow_mut().last = Some(Rc::new(ended));
        self.changed.notify_waiters();
    }

    /// It will not be started again by itself.
    fn retire(&self) {
        self.state.borrow_mut().retired = true;
        self.changed.notify_waiters();
    }

    fn write_output(&self, stderr: bool, bytes: &[u8]) {
        let now_us = now_us();
        self.output.borrow_mut().push(stderr, now_us / 1000, bytes);
        if let Some(speaker) = &*self.speaker.borrow() {
            self.lines.push(speaker, stderr, now_us, bytes);
        }
        self.changed.notify_waiters();
    }

    /// What it said last is a line, whether terminated or not.
    fn fall_silent(&self) {
        if let Some(speaker) = &*self.speaker.borrow() {
            self.lines.end(speaker, now_us());
        }
    }

    /// Whether what it says there is thrown away.
    fn discards(&self, stderr: bool) -> bool {
        if stderr { self.spec.discard_stderr } else { self.spec.discard_stdout }
    }

    /// Whether its output has to wait for a slow reader.
    fn held_back(&self) -> bool {
        let ahead = |offset| self.output.borrow().size_after(offset) > AHEAD_MAX;
        self.slowed_by.get().is_some_and(ahead)
    }

    fn slow_down_for(&self, offset: Option<u64>) {
        self.slowed_by.set(offset);
        self.changed.notify_waiters();
    }

    pub(crate) fn status(&self) -> ProcessStatus {
        let state = self.state.borrow();
        let output = self.output.borrow();
        ProcessStatus {
            pid: state.pid,
            command: shown(&self.spec.command),
            name: self.name().map(str::to_owned),
            terminal: self.spec.terminal.is_some(),
            terminal_size: self.terminal_size.get(),
            stdin_open: self.stdin.borrow().is_some(),
            started_at_ms: state.started_at_ms,
            ended_at_ms: state.ended_at_ms,
            exit: state.exit,
            restarts: state.restarts_shown,
            next_start_at_ms: state.next_start_at_ms,
            output_bytes: output.end(),
            output_dropped: output.start(),
            supervision: self.spec.supervise.clone().map(Box::new),
            health: state.health,
            last_exit: state.last_exit,
        }
    }
}

/// The beginning of a command.
fn shown(command: &[String]) -> Vec<String> {
    let mut left = COMMAND_SHOWN;
    let mut shown = Vec::new();
    for word in command {
        if word.len() >= left {
            shown.push(format!("{}…", &word[..word.floor_char_boundary(left)]));
            break;
        }
        // Empty words take room in a packet too.
        left = left.saturating_sub(word.len() + 4);
        shown.push(word.clone());
    }
    shown
}

fn now_ms() -> u64 {
    now_us() / 1000
}

fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_shows_the_beginning_of_a_huge_command() {
        let many = vec![String::new(); 100_000];
        assert!(shown(&many).len() <= COMMAND_SHOWN / 4 + 1);
        let long = vec!["echo".to_owned(), "é".repeat(5000)];
        assert!(shown(&long)[1].len() <= COMMAND_SHOWN + 3);
        assert_eq!(shown(&["ls".to_owned(), "-l".to_owned()]), ["ls", "-l"]);
    }
}
