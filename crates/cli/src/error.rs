//! What can go wrong for somebody at a command line, what they are told and how we exit.
//!
//! Commands return an [`Error`]; it is rendered once, in `lib.rs`. Exit codes: 1 the request was
//! refused or failed, 2 wrong usage, 70 our fault or the daemon's; `run` and `exec` also pass on the
//! code of the command inside.

use std::io;
use std::process::ExitCode;

use torpor_client::{Error as Client, Subject};
use torpor_protocol::{ErrorBody, ErrorCode};

use crate::output;

/// The request was refused, or failed for a reason outside of Torpor.
pub(crate) const EXIT_FAILED: u8 = 1;
/// The command line makes no sense.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Our fault, or the daemon's (`EX_SOFTWARE`).
pub(crate) const EXIT_INTERNAL: u8 = 70;
/// What a shell reports for a program that was ended by SIGPIPE.
pub(crate) const EXIT_BROKEN_PIPE: u8 = 141;
/// What a shell reports for a program that was ended by SIGINT.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;
/// What `timeout` and shells report when time was up.
pub(crate) const EXIT_TIMED_OUT: u8 = 124;
/// What shells report for a command that can't be started.
pub(crate) const EXIT_CANNOT_START: u8 = 127;

/// Characters that are shown of an answer that is none of ours.
const STRANGE_WIDTH: usize = 200;

/// Why a command did not do what it should.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The daemon was not reached, said no, or is none.
    #[error(transparent)]
    Client(#[from] Client),
    /// Something on this computer: a file, the terminal.
    #[error("{what}")]
    Local {
        what: String,
        #[source]
        source: io::Error,
    },
    /// It can't be done, and the user can do something about it.
    #[error("{message}")]
    Failed { message: String, hint: Option<String> },
    /// The arguments don't fit together.
    #[error("{message}")]
    Usage { message: String, hint: Option<String> },
    /// Whoever read our output has gone; not worth a word.
    #[error("the reader of the output has gone")]
    BrokenPipe,
    /// Everything has been said already.
    #[error("exit code {0}")]
    Exit(u8),
    /// Our fault.
    #[error("{what}")]
    Internal { what: String, why: String },
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl From<torpor_bench::Error> for Error {
    fn from(error: torpor_bench::Error) -> Self {
        use torpor_bench::Error as Bench;
        match error {
            Bench::Client(error) => error.into(),
            Bench::Local { what, source } => Self::local(what, source),
            Bench::Failed(message) => Self::failed(message),
            Bench::Usage(message) => Self::usage(message),
            Bench::Interrupted => Self::Exit(EXIT_INTERRUPTED),
        }
    }
}

impl Error {
    /// An error of a file, the terminal or the like. A broken pipe stays what it is.
    pub(crate) fn local(what: impl Into<String>, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::BrokenPipe {
            return Self::BrokenPipe;
        }
        Self::Local { what: what.into(), source }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), hint: None }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: None }
    }

    pub(crate) fn garbled(what: &str, why: impl ToString) -> Self {
        Client::garbled(what, why).into()
    }

    pub(crate) fn internal(what: &str, why: impl ToString) -> Self {
        Self::Internal { what: what.to_owned(), why: why.to_string() }
    }

    /// The code of a refusal.
    pub(crate) fn code(&self) -> Option<ErrorCode> {
        if let Self::Client(error) = self { error.code() } else { None }
    }

    /// Replaces the hint of a refusal with this code.
    pub(crate) fn with_hint(mut self, code: ErrorCode, hint: &str) -> Self {
        if let Self::Client(Client::Refused { body, .. }) = &mut self
            && body.code == code
        {
            body.hint = Some(hint.to_owned());
        }
        self
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Client(Client::Refused { body, .. }) if body.code == ErrorCode::Internal => {
                EXIT_INTERNAL
            }
            Self::Client(Client::BadKey | Client::NoCertificates { .. }) | Self::Usage { .. } => {
                EXIT_USAGE
            }
            Self::Client(Client::Garbled { .. } | Client::Internal { .. })
            | Self::Internal { .. } => EXIT_INTERNAL,
            Self::Client(_) | Self::Local { .. } | Self::Failed { .. } => EXIT_FAILED,
            Self::BrokenPipe => EXIT_BROKEN_PIPE,
            Self::Exit(code) => *code,
        })
    }

    fn cause(&self) -> Option<String> {
        match self {
            Self::Client(Client::Garbled { why, .. }) => {
                why.as_ref().map(|why| output::cut(why, STRANGE_WIDTH))
            }
            Self::Client(Client::Unreachable { why, .. } | Client::Internal { why, .. })
            | Self::Internal { why, .. } => Some(why.clone()),
            Self::Local { source, .. } => Some(source.to_string()),
            Self::Client(_)
            | Self::Failed { .. }
            | Self::Usage { .. }
            | Self::BrokenPipe
            | Self::Exit(_) => None,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Client(error) => hint_about(error),
            Self::Failed { hint, .. } | Self::Usage { hint, .. } => hint.clone(),
            Self::Local { .. } | Self::BrokenPipe | Self::Exit(_) | Self::Internal { .. } => None,
        }
    }

    /// What is printed, without terminal escapes whoever wrote the message; empty: nothing.
    pub(crate) fn render(&self, verbose: bool) -> String {
        if matches!(self, Self::BrokenPipe | Self::Exit(_)) {
            return String::new();
        }
        let mut lines = vec![format!("error: {}", output::plain_lines(&self.to_string()))];
        if let Some(cause) = self.cause() {
            lines.push(format!("caused by: {}", output::plain_lines(&cause)));
        }
        if let Some(hint) = self.hint() {
            lines.push(format!("hint: {}", output::plain_lines(&hint)));
        }
        if let Self::Client(Client::Refused { body, .. }) = self
            && verbose
        {
            lines.push(format!("request id: {}", output::plain(&body.request_id)));
        }
        lines.push(String::new());
        lines.join("\n")
    }
}

/// What to do about what came of a request.
fn hint_about(error: &Client) -> Option<String> {
    let hint = match error {
        Client::Refused { body, about } => {
            let ours = own_hint(body.code, about.as_ref());
            return ours.or_else(|| body.hint.clone()).or_else(|| usual_hint(body));
        }
        Client::Unreachable { .. } => "start it with: torpor serve",
        Client::Distrusted { .. } => {
            "--ca-file or TORPOR_CA_FILE names a file with the certificate of an authority that this \
             computer does not know"
        }
        Client::Garbled { .. } => "is that a Torpor daemon of this version?",
        Client::BrokenOff { .. }
        | Client::TimedOut
        | Client::BadKey
        | Client::NoCertificates { .. }
        | Client::Internal { .. } => return None,
    };
    Some(hint.to_owned())
}

/// What to type, where the daemon can only say what to send.
fn own_hint(code: ErrorCode, about: Option<&Subject>) -> Option<String> {
    let Some(Subject::Sandbox(name)) = about else { return None };
    (code == ErrorCode::SandboxAsleep).then(|| {
        format!("wake it with: torpor wake {name}; torpor update {name} --auto-wake lets requests")
    })
}

/// What to do about a refusal that does not say so itself.
fn usual_hint(body: &ErrorBody) -> Option<String> {
    let hint = match body.code {
        ErrorCode::Unauthenticated => "give a key with --api-key or TORPOR_API_KEY",
        ErrorCode::SandboxNotFound => "list them with: torpor ps",
        ErrorCode::ImageNotFound => "list them with: torpor image ls",
        ErrorCode::SnapshotNotFound => "list them with: torpor snapshot ls",
        ErrorCode::VolumeNotFound => "list them with: torpor volume ls, torpor drive ls",
        ErrorCode::SnapshotNotReady => "see how it stands with: torpor snapshot ls",
        ErrorCode::SandboxAsleep => "wake it with: torpor wake",
        ErrorCode::Internal => {
            return Some(format!("the daemon's log says more under {}", body.request_id));
        }
        ErrorCode::InvalidRequest
        | ErrorCode::ProcessNotFound
        | ErrorCode::FileNotFound
        | ErrorCode::NotFound
        | ErrorCode::MethodNotAllowed
        | ErrorCode::AlreadyExists
        | ErrorCode::InUse
        | ErrorCode::SandboxFailed
        | ErrorCode::SandboxTerminated
        | ErrorCode::EventsForgotten
        | ErrorCode::CommandFailed
        | ErrorCode::FileRefused
        | ErrorCode::PortNotListening
        | ErrorCode::PortNotExposed
        | ErrorCode::NotPermitted
        | ErrorCode::TooLarge
        | ErrorCode::CapacityReached
        | ErrorCode::RateLimited
        | ErrorCode::LimitReached
        | ErrorCode::IdempotencyKeyReused
        | ErrorCode::IdempotencyInProgress
        | ErrorCode::IdempotencyOutcomeUnknown
        | ErrorCode::ImageCorrupt
        | ErrorCode::SnapshotCorrupt
        | ErrorCode::SnapshotIncompatible
        | ErrorCode::RegistryUnavailable
        | ErrorCode::RegistryDenied
        | ErrorCode::Timeout
        | ErrorCode::Unsupported
        | ErrorCode::ShuttingDown => return None,
    };
    Some(hint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: ErrorCode, message: &str) -> Error {
        refused_with(code, message, None)
    }

    fn refused_with(code: ErrorCode, message: &str, hint: Option<String>) -> Error {
        let body = ErrorBody { code, message: message.into(), hint, request_id: "r-1".to_owned() };
        let about = Some(Subject::Sandbox("web".into()));
        Client::Refused { body: Box::new(body), about }.into()
    }

    #[test]
    fn a_refusal_says_what_and_what_to_do() {
        let error = refused(ErrorCode::Unauthenticated, "no API key");
        assert_eq!(
            error.render(true),
            "error: no API key\nhint: give a key with --api-key or TORPOR_API_KEY\nrequest id: r-1\n"
        );
        assert!(!error.render(false).contains("r-1"));
    }

    #[test]
    fn an_error_message_cannot_drive_the_terminal() {
        let text = refused(ErrorCode::InvalidRequest, "bad \x1b]0;owned\x07").render(false);
        assert_eq!(text, "error: bad \\u{1b}]0;owned\\u{7}\n");
    }

    #[test]
    fn a_sleeping_sandbox_can_be_woken() {
        // The daemon's own hint is for those who speak HTTP.
        let hint = Some("POST …/wake".to_owned());
        let text = refused_with(ErrorCode::SandboxAsleep, "web sleeps", hint).render(false);
        assert!(
            text.starts_with("error: web sleeps\nhint: wake it with: torpor wake web;"),
            "{text}"
        );
    }

    #[test]
    fn a_broken_pipe_is_silent() {
        let error = Error::local("write", io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(error.render(true), "");
    }

    #[test]
    fn only_an_internal_error_exits_with_70() {
        for &code in ErrorCode::ALL {
            let expected = if code == ErrorCode::Internal { EXIT_INTERNAL } else { EXIT_FAILED };
            let exit = format!("{:?}", refused(code, "x").exit_code());
            assert_eq!(exit, format!("{:?}", ExitCode::from(expected)), "{code:?}");
        }
    }
}
