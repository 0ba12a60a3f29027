//! Which processes there are: running, about to be restarted, or ended and kept for inspection.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;

use rustix::process::WaitStatus;
use tokio::sync::oneshot;
use torpor_protocol::guest::{Failure, FailureCode};

use super::Process;
use crate::failure::failure;

/// Processes that may run, or wait to be restarted, at once.
const LIVE_MAX: usize = 1024;
/// Ended processes kept for inspection.
const ENDED_MAX: usize = 256;
/// Output kept of all ended processes together.
const ENDED_OUTPUT_MAX: usize = 16 * 1024 * 1024;
/// Ended processes whose output goes on because others hold it open.
const LINGERING_MAX: usize = 256;

#[derive(Default)]
pub(crate) struct Table {
    by_pid: RefCell<BTreeMap<u32, Rc<Process>>>,
    by_name: RefCell<HashMap<String, Rc<Process>>>,
    /// Oldest first.
    ended: RefCell<VecDeque<Rc<Process>>>,
    /// Started and not reaped.
    running: RefCell<HashMap<u32, Rc<Process>>>,
    /// Started for somebody inside and not reaped: who waits for its end.
    bystanders: RefCell<HashMap<u32, oneshot::Sender<WaitStatus>>>,
    live: Cell<usize>,
    /// Of the live ones, those that keep the sandbox awake.
    keeping_awake: Cell<usize>,
    lingering: Cell<usize>,
    started: Cell<u64>,
}

impl Table {
    pub(crate) fn running(&self) -> usize {
        self.running.borrow().len() + self.bystanders.borrow().len()
    }

    pub(crate) fn keeping_awake(&self) -> usize {
        self.keeping_awake.get()
    }

    pub(crate) fn started(&self) -> u64 {
        self.started.get()
    }

    pub(crate) fn find(&self, pid: u32) -> Result<Rc<Process>, Failure> {
        let found = self.by_pid.borrow().get(&pid).cloned();
        found.ok_or_else(|| {
            failure(FailureCode::NoSuchProcess, format!("there is no process {pid}"))
        })
    }

    pub(crate) fn find_named(&self, name: &str) -> Result<Rc<Process>, Failure> {
        let found = self.by_name.borrow().get(name).cloned();
        found.ok_or_else(|| {
            failure(FailureCode::NoSuchProcess, format!("there is no process named {name}"))
        })
    }

    pub(crate) fn all(&self) -> Vec<Rc<Process>> {
        self.by_pid.borrow().values().cloned().collect()
    }

    pub(super) fn running_pids(&self) -> Vec<u32> {
        let bystanders = self.bystanders.borrow();
        self.running.borrow().keys().chain(bystanders.keys()).copied().collect()
    }

    /// Makes room for a process before it is started.
    pub(super) fn admit(&self, process: &Rc<Process>) -> Result<(), Failure> {
        if self.live.get() >= LIVE_MAX {
            let message = format!("{LIVE_MAX} processes are running already");
            return Err(failure(FailureCode::Limit, message));
        }
        if let Some(name) = process.name() {
            let mut names = self.by_name.borrow_mut();
            if let Some(other) = names.get(name)
                && !Rc::ptr_eq(other, process)
                && !other.retired()
            {
                let message = format!("there is a process named {name} already");
                return Err(failure(FailureCode::Exists, message));
            }
            names.insert(name.to_owned(), process.clone());
        }
        self.live.set(self.live.get() + 1);
        let awake = usize::from(process.spec.keep_awake);
        self.keeping_awake.set(self.keeping_awake.get() + awake);
        self.ended.borrow_mut().retain(|other| !Rc::ptr_eq(other, process));
        Ok(())
    }

    /// Takes back `admit`.
    pub(super) fn dismiss(&self, process: &Rc<Process>) {
        if process.retired() {
            return self.retire(process);
        }
        self.no_longer_live(process);
        self.forget_name(process);
    }

    fn no_longer_live(&self, process: &Process) {
        self.live.set(self.live.get() - 1);
        let awake = usize::from(process.spec.keep_awake);
        self.keeping_awake.set(self.keeping_awake.get() - awake);
    }

    /// The process runs, under the pid it has now and no other.
    pub(super) fn enter(&self, process: &Rc<Process>, pid_before: u32) {
        self.forget_pid(process, pid_before);
        let pid = process.pid();
        self.by_pid.borrow_mut().insert(pid, process.clone());
        self.running.borrow_mut().insert(pid, process.clone());
        self.started.set(self.started.get() + 1);
    }

    /// A process runs that is nobody's business here but has to be reaped: tells its end.
    pub(super) fn stand_by(&self, pid: u32) -> oneshot::Receiver<WaitStatus> {
        let (tell, end) = oneshot::channel();
        self.bystanders.borrow_mut().insert(pid, tell);
        self.started.set(self.started.get() + 1);
        end
    }

    /// The kernel let go of a child, which may be none of ours.
    pub(super) fn reaped(&self, pid: u32, status: WaitStatus) {
        let process = self.running.borrow_mut().remove(&pid);
        if let Some(process) = process {
            process.reaped(status);
        }
        if let Some(tell) = self.bystanders.borrow_mut().remove(&pid) {
            // Whoever does not wait any more does not want to know.
            let _ = tell.send(status);
        }
    }

    /// The process ended for good.
    pub(super) fn retire(&self, process: &Rc<Process>) {
        self.no_longer_live(process);
        process.retire();
        let mut ended = self.ended.borrow_mut();
        ended.push_back(process.clone());
        if ended.len() > ENDED_MAX
            && let Some(oldest) = ended.pop_front()
        {
            self.forget_pid(&oldest, oldest.pid());
            self.forget_name(&oldest);
        }
        let mut output: usize = ended.iter().map(|ended| ended.output.borrow().size()).sum();
        for oldest in ended.iter() {
            if output <= ENDED_OUTPUT_MAX {
                break;
            }
            output -= oldest.output.borrow().size();
            oldest.output.borrow_mut().clear();
        }
    }

    /// Whether one more ended process may be listened to.
    pub(super) fn linger(self: &Table) -> bool {
        let allowed = self.lingering.get() < LINGERING_MAX;
        self.lingering.set(self.lingering.get() + usize::from(allowed));
        allowed
    }

    pub(super) fn silent(&self) {
        self.lingering.set(self.lingering.get() - 1);
    }

    fn forget_pid(&self, process: &Rc<Process>, pid: u32) {
        let mut by_pid = self.by_pid.borrow_mut();
        // The kernel may have given the number to another one of ours.
        if by_pid.get(&pid).is_some_and(|other| Rc::ptr_eq(other, process)) {
            by_pid.remove(&pid);
        }
    }

    fn forget_name(&self, process: &Rc<Process>) {
        let Some(name) = process.name() else { return };
        let mut by_name = self.by_name.borrow_mut();
        if by_name.get(name).is_some_and(|other| Rc::ptr_eq(other, process)) {
            by_name.remove(name);
        }
    }
}
