//! Turns a [`ProcessSpec`] into a running child.
//!
//! Everything that can be known before the fork is checked before it, so that the answer says what
//! is wrong: no such user, no such directory, command not found.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::Interest;
use torpor_protocol::guest::{Failure, FailureCode, Identity, ProcessSpec, TerminalSize};

use super::child::{self, Birth, Ids};
use super::now_ms;
use super::user::{self, Account, Missing};
use crate::agent::Agent;
use crate::ca::VARIABLES;
use crate::descriptor::{Descriptor, watched};
use crate::failure::{failure, reason};
use crate::terminal;

pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Runs scripts that do not say what runs them.
const SHELL: &str = "/bin/sh";

/// A child that runs.
pub(super) struct Spawned {
    pub(super) pid: u32,
    /// Taken before it was born, so that nothing it says is older than it.
    pub(super) started_at_ms: u64,
    pub(super) stdin: Option<Rc<Descriptor>>,
    pub(super) terminal: Option<Rc<Descriptor>>,
    pub(super) outlets: Outlets,
}

/// Where a process's output comes from; none once it is at its end.
pub(super) struct Outlets {
    pub(super) stdout: Option<Rc<Descriptor>>,
    pub(super) stderr: Option<Rc<Descriptor>>,
}

/// What will be executed, where, and as whom.
struct Plan {
    program: PathBuf,
    arguments: Vec<String>,
    env: BTreeMap<String, String>,
    cwd: PathBuf,
    /// Whom the child has to become, if not who the agent is.
    user: Option<Account>,
}

/// Starts the child. Whatever fails, no child and no descriptor is left.
pub(super) fn spawn(agent: &Agent, spec: &ProcessSpec) -> Result<Spawned, Failure> {
    let plan = plan(&agent.identity.borrow(), spec)?;
    attempt(plan, spec, |plan| start(agent, plan, spec))
}

/// Starts the child of somebody who brings all that it gets: stdio, directory, environment. Its pid.
pub(super) fn spawn_onto(
    agent: &Agent,
    spec: &ProcessSpec,
    stdio: [BorrowedFd<'_>; 3],
) -> Result<u32, Failure> {
    let plan = plan(&Identity::default(), spec)?;
    attempt(plan, spec, |plan| plan.give_birth(agent, stdio, false))
}

fn attempt<T>(
    mut plan: Plan,
    spec: &ProcessSpec,
    start: impl Fn(&Plan) -> io::Result<T>,
) -> Result<T, Failure> {
    let started = match start(&plan) {
        // A script that does not say what runs it is for the shell, as everywhere.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOEXEC) => {
            plan.arguments[0] = plan.program.to_string_lossy().into_owned();
            plan.arguments.insert(0, SHELL.to_owned());
            plan.program = PathBuf::from(SHELL);
            start(&plan)
        }
        started => started,
    };
    started.map_err(|error| describe(&plan, spec, &error))
}

fn start(agent: &Agent, plan: &Plan, spec: &ProcessSpec) -> io::Result<Spawned> {
    match spec.terminal {
        Some(size) => with_terminal(agent, plan, size),
        None => with_pipes(agent, plan, spec.stdin),
    }
}

fn with_terminal(agent: &Agent, plan: &Plan, size: TerminalSize) -> io::Result<Spawned> {
    let (ours, theirs) = terminal::open(size)?;
    if let Some(user) = &plan.user {
        // Programs in the terminal open it by name. Those that can't are rare.
        let _ = rustix::fs::fchown(&theirs, Some(rustix::fs::Uid::from_raw(user.uid)), None);
    }
    let ours = Rc::new(watched(ours, Interest::READABLE | Interest::WRITABLE)?);
    let started_at_ms = now_ms();
    let pid = plan.give_birth(agent, [theirs.as_fd(); 3], true)?;
    Ok(Spawned {
        pid,
        started_at_ms,
        stdin: Some(ours.clone()),
        terminal: Some(ours.clone()),
        outlets: Outlets { stdout: Some(ours), stderr: None },
    })
}

fn with_pipes(agent: &Agent, plan: &Plan, wants_stdin: bool) -> io::Result<Spawned> {
    let (stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    let outlets = Outlets {
        stdout: Some(Rc::new(watched(stdout, Interest::READABLE)?)),
        stderr: Some(Rc::new(watched(stderr, Interest::READABLE)?)),
    };
    let (their_stdin, stdin) = if wants_stdin {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (Some(theirs), Some(Rc::new(watched(ours, Interest::WRITABLE)?)))
    } else {
        (None, None)
    };
    let their_stdin = their_stdin.as_ref().map_or(agent.null.as_fd(), AsFd::as_fd);
    let stdio = [their_stdin, their_stdout.as_fd(), their_stderr.as_fd()];
    let started_at_ms = now_ms();
    let pid = plan.give_birth(agent, stdio, false)?;
    Ok(Spawned { pid, started_at_ms, stdin, terminal: None, outlets })
}

impl Plan {
    fn give_birth(
        &self,
        agent: &Agent,
        stdio: [BorrowedFd<'_>; 3],
        terminal: bool,
    ) -> io::Result<u32> {
        if agent.quiesce.quiesced() {
            // It would stand still before it lives, and the agent with it.
            return Err(Errno::AGAIN.into());
        }
        let text = |text: &[u8]| CString::new(text).map_err(io::Error::from);
        let arguments = self.arguments.iter().map(|word| text(word.as_bytes()));
        let variables = self.env.iter().map(|(name, value)| format!("{name}={value}"));
        child::give(&Birth {
            program: &text(self.program.as_os_str().as_bytes())?,
            arguments: &arguments.collect::<io::Result<Vec<_>>>()?,
            environment: &variables
                .map(|it| text(it.as_bytes()))
                .collect::<io::Result<Vec<_>>>()?,
            cwd: &text(self.cwd.as_os_str().as_bytes())?,
            stdio,
            terminal,
            open_files: agent.open_files.map(|limit| libc::rlimit {
                rlim_cur: limit.current.unwrap_or(libc::RLIM_INFINITY),
                rlim_max: limit.maximum.unwrap_or(libc::RLIM_INFINITY),
            }),
            user: self.user.as_ref().map(|account| Ids {
                uid: account.uid,
                gid: account.gid,
                groups: &account.groups,
            }),
            group: agent.quiesce.joining(),
        })
    }
}

// === Before the fork ===

fn no_account(missing: Missing) -> Failure {
    let code = match missing {
        Missing::User(_) => FailureCode::NoSuchUser,
        Missing::Group(_) => FailureCode::CannotStart,
    };
    failure(code, missing.to_string())
}

fn plan(identity: &Identity, spec: &ProcessSpec) -> Result<Plan, Failure> {
    check_text(spec)?;
    let cannot_start = |message: String| failure(FailureCode::CannotStart, message);
    let wanted = spec.user.as_ref().or(identity.user.as_ref());
    let account = match wanted {
        Some(wanted) => user::find(wanted).map_err(no_account)?,
        None => user::current(),
    };
    let own = rustix::process::geteuid();
    if !own.is_root() && account.uid != own.as_raw() {
        return Err(cannot_start(format!("only root can start processes as uid {}", account.uid)));
    }
    let env = environment(identity, spec, &account);
    let cwd = directory(identity, spec, &env)?;
    let program = look_up(&spec.command[0], &cwd, env.get("PATH").map_or(PATH, |path| path))?;
    let user = (own.is_root() && wanted.is_some()).then_some(account);
    Ok(Plan { program, arguments: spec.command.clone(), env, cwd, user })
}

/// The kernel takes text that ends at the first NUL; what would be cut is refused.
fn check_text(spec: &ProcessSpec) -> Result<(), Failure> {
    let invalid = |message: &str| Err(failure(FailureCode::Invalid, message));
    if spec.command.first().is_none_or(String::is_empty) {
        return invalid("the command is empty");
    }
    if spec.command.iter().any(|word| word.contains('\0')) {
        return invalid("the command holds a NUL byte");
    }
    if spec.env.keys().any(|name| name.is_empty() || name.contains('=')) {
        return invalid("the name of an environment variable is empty or holds '='");
    }
    if spec.env.iter().any(|(name, value)| name.contains('\0') || value.contains('\0')) {
        return invalid("an environment variable holds a NUL byte");
    }
    if spec.cwd.as_ref().is_some_and(|cwd| cwd.contains('\0')) {
        return invalid("the directory holds a NUL byte");
    }
    Ok(())
}

fn environment(
    identity: &Identity,
    spec: &ProcessSpec,
    account: &Account,
) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([("PATH".to_owned(), PATH.to_owned())]);
    env.insert("HOME".to_owned(), account.home.clone().unwrap_or_else(|| "/".to_owned()));
    if let Some(name) = &account.name {
        env.insert("USER".to_owned(), name.clone());
        env.insert("LOGNAME".to_owned(), name.clone());
    }
    if let Some(shell) = &account.shell {
        env.insert("SHELL".to_owned(), shell.clone());
    }
    if spec.terminal.is_some() {
        env.insert("TERM".to_owned(), terminal::TERM.to_owned());
    }
    if identity.ca.is_some() || !identity.extra_ca.is_empty() {
        env.extend(VARIABLES.map(|(name, place)| (name.to_owned(), place.to_owned())));
    }
    for (name, value) in identity.env.iter().chain(&spec.env) {
        env.insert(name.clone(), value.clone());
    }
    env
}

/// The directory asked for, or the image's, or the user's.
fn directory(
    identity: &Identity,
    spec: &ProcessSpec,
    env: &BTreeMap<String, String>,
) -> Result<PathBuf, Failure> {
    let home = || env.get("HOME").filter(|home| Path::new(home).is_dir()).cloned();
    let default = || identity.workdir.clone().or_else(home).unwrap_or_else(|| "/".to_owned());
    let cwd = match &spec.cwd {
        Some(cwd) if cwd.starts_with('/') => PathBuf::from(cwd),
        Some(cwd) => Path::new(&default()).join(cwd),
        None => PathBuf::from(default()),
    };
    match fs::metadata(&cwd) {
        Ok(found) if found.is_dir() => Ok(cwd),
        Ok(_) => Err(format!("not a directory: {}", cwd.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(format!("no such directory: {}", cwd.display()))
        }
        Err(error) => Err(format!("cannot use directory {}: {}", cwd.display(), reason(&error))),
    }
    .map_err(|message| failure(FailureCode::CannotStart, message))
}

/// Finds the program as a shell would.
fn look_up(program: &str, cwd: &Path, path: &str) -> Result<PathBuf, Failure> {
    let cannot_start = |message: String| Err(failure(FailureCode::CannotStart, message));
    if program.contains('/') {
        let found = cwd.join(program);
        return match fs::metadata(&found) {
            Ok(file) if file.is_dir() => cannot_start(format!("is a directory: {program}")),
            Ok(file) if !executable(&file) => {
                cannot_start(format!("permission denied: {program} is not executable"))
            }
            Ok(_) => Ok(found),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                cannot_start(format!("permission denied: {program}"))
            }
            Err(_) => cannot_start(format!("command not found: {program}")),
        };
    }
    let mut not_executable = None;
    for directory in path.split(':') {
        let found = cwd.join(directory).join(program);
        match fs::metadata(&found) {
            Ok(file) if file.is_file() && executable(&file) => return Ok(found),
            Ok(file) if file.is_file() => not_executable = Some(found),
            Ok(_) | Err(_) => {}
        }
    }
    match not_executable {
        Some(found) => {
            cannot_start(format!("permission denied: {} is not executable", found.display()))
        }
        None => cannot_start(format!("command not found: {program}")),
    }
}

fn executable(file: &fs::Metadata) -> bool {
    file.permissions().mode() & 0o111 != 0
}

/// Why the child did not come to life, in words of what was asked for.
fn describe(plan: &Plan, spec: &ProcessSpec, error: &io::Error) -> Failure {
    let program = &spec.command[0];
    let message = match Errno::from_io_error(error) {
        // The program was there a moment ago, so it is what the program needs to run.
        Some(Errno::NOENT) => format!("cannot start {program}: its interpreter is missing"),
        Some(Errno::ACCESS) => format!("permission denied: {}", plan.program.display()),
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => {
            let message = format!("cannot start {program}: {}", reason(error));
            return failure(FailureCode::Limit, message);
        }
        Some(_) | None => format!("cannot start {program}: {}", reason(error)),
    };
    failure(FailureCode::CannotStart, message)
}
