//! From what a client wants to run to what the agent is told. A field that means nothing where it
//! was sent is refused rather than ignored.

use torpor_lifecycle::guest::{Guest, GuestError};
use torpor_protocol::api::Command;
use torpor_protocol::guest::{ProcessSpec, Request};

use crate::error::{Error, Result};

/// `run`: attached until it ends. Gives the text for its standard input, too.
pub(super) fn attached(command: Command) -> Result<(ProcessSpec, Option<String>)> {
    refuse("terminal", command.terminal.is_some(), "exec and processes")?;
    refuse("keep_stdin", command.keep_stdin, "processes")?;
    refuse("detachable", command.detachable, "exec")?;
    refuse("supervise", command.supervise.is_some(), "processes")?;
    refuse_discard(&command)?;
    let stdin = command.stdin.clone();
    let spec = ProcessSpec { stdin: stdin.is_some(), ..common(command) };
    Ok((spec, stdin))
}

/// `exec`: attached, with standard input as it comes.
pub fn interactive(command: Command) -> Result<ProcessSpec> {
    refuse("stdin", command.stdin.is_some(), "run; here it is binary messages")?;
    refuse("keep_stdin", command.keep_stdin, "processes")?;
    refuse("supervise", command.supervise.is_some(), "processes")?;
    refuse_discard(&command)?;
    let survives_detach = command.detachable;
    Ok(ProcessSpec { stdin: true, survives_detach, ..common(command) })
}

/// `processes`: on its own.
pub(super) fn background(command: Command) -> Result<ProcessSpec> {
    refuse("stdin", command.stdin.is_some(), "run; here it is keep_stdin and PUT …/stdin")?;
    refuse("detachable", command.detachable, "exec")?;
    let stdin = command.keep_stdin || command.terminal.is_some();
    Ok(ProcessSpec { stdin, survives_detach: true, ..common(command) })
}

fn refuse_discard(command: &Command) -> Result<()> {
    refuse("discard_stdout", command.discard_stdout, "processes")?;
    refuse("discard_stderr", command.discard_stderr, "processes")
}

fn refuse(field: &str, given: bool, place: &str) -> Result<()> {
    if given {
        return Err(Error::invalid(format!("{field} is for {place}")));
    }
    Ok(())
}

fn common(command: Command) -> ProcessSpec {
    ProcessSpec {
        command: command.command,
        env: command.env,
        cwd: command.cwd,
        user: command.user,
        stdin: false,
        terminal: command.terminal,
        timeout_ms: command.timeout_ms,
        survives_detach: false,
        keep_awake: command.keep_awake,
        supervise: command.supervise,
        discard_stdout: command.discard_stdout,
        discard_stderr: command.discard_stderr,
    }
}

/// How a path names a process: by number, or by the name of a supervised one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessRef {
    Pid(u32),
    Name(String),
}

impl<'de> serde::Deserialize<'de> for ProcessRef {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Ok(text.parse().map_or(Self::Name(text), Self::Pid))
    }
}

impl ProcessRef {
    pub async fn pid(&self, guest: &Guest) -> std::result::Result<u32, GuestError> {
        match self {
            Self::Pid(pid) => Ok(*pid),
            Self::Name(_) => Ok(guest.process(&self.request()).await?.pid),
        }
    }

    pub fn request(&self) -> Request {
        match self {
            Self::Pid(pid) => Request::Process { pid: *pid },
            Self::Name(name) => Request::ProcessNamed { name: name.clone() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_in_the_wrong_place_is_refused_by_name() {
        let error = attached(Command { keep_stdin: true, ..Default::default() }).unwrap_err();
        assert_eq!(error.to_string(), "keep_stdin is for processes");
        let error = background(Command { detachable: true, ..Default::default() }).unwrap_err();
        assert_eq!(error.to_string(), "detachable is for exec");
    }

    #[test]
    fn a_process_is_named_by_number_or_name() {
        let parse = |text: &str| {
            serde_json::from_value::<ProcessRef>(serde_json::Value::from(text)).unwrap()
        };
        assert_eq!(parse("17"), ProcessRef::Pid(17));
        assert_eq!(parse("web"), ProcessRef::Name("web".into()));
        assert_eq!(parse("99999999999"), ProcessRef::Name("99999999999".into()));
    }
}
