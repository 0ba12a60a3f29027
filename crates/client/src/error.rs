//! Why a request did not get its answer.

use std::path::PathBuf;

use torpor_protocol::{ErrorBody, ErrorCode};

/// What a request is about, as the user called it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    Sandbox(String),
    Snapshot(String),
}

/// Closed: whoever shows errors matches all of them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers at the address of the daemon.
    #[error("can't reach the daemon at {server}")]
    Unreachable { server: String, why: String },
    /// Somebody answers there who can't show that they are who they should be.
    #[error("the certificate of {server} is not believed: {why}")]
    Distrusted { server: String, why: String },
    /// The daemon said no.
    #[error("{}", body.message)]
    Refused {
        body: Box<ErrorBody>,
        /// What the request was about.
        about: Option<Subject>,
    },
    /// What answers does not speak our API, or not to its end.
    #[error("{what}")]
    Garbled { what: String, why: Option<String> },
    /// The connection, or what its body was read from, failed.
    #[error("the request broke off: {why}")]
    BrokenOff { why: String },
    #[error("the daemon did not answer in time")]
    TimedOut,
    #[error("the API key has characters that no key has")]
    BadKey,
    #[error("there are no certificates (PEM) in {}", path.display())]
    NoCertificates { path: PathBuf },
    /// Our fault.
    #[error("{what}")]
    Internal { what: String, why: String },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A refusal that came inside of an answer.
    pub fn refused(body: ErrorBody) -> Self {
        Self::Refused { body: Box::new(body), about: None }
    }

    pub fn garbled(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Garbled { what: what.into(), why: Some(why.to_string()) }
    }

    fn refusal(&self) -> Option<(&ErrorBody, Option<&Subject>)> {
        if let Self::Refused { body, about } = self { Some((body, about.as_ref())) } else { None }
    }

    /// The code of a refusal.
    pub fn code(&self) -> Option<ErrorCode> {
        self.refusal().map(|(body, _)| body.code)
    }

    /// The sandbox or snapshot that was asked for and does not exist.
    pub fn missing(&self) -> Option<&Subject> {
        let (body, about) = self.refusal()?;
        about.filter(|about| match about {
            Subject::Sandbox(_) => body.code == ErrorCode::SandboxNotFound,
            Subject::Snapshot(_) => body.code == ErrorCode::SnapshotNotFound,
        })
    }

    /// Says that the request named this snapshot in its body, should it be the one that is missing.
    pub fn naming_snapshot(mut self, snapshot: Option<&str>) -> Self {
        if let (Self::Refused { body, about }, Some(snapshot)) = (&mut self, snapshot)
            && body.code == ErrorCode::SnapshotNotFound
        {
            *about = Some(Subject::Snapshot(snapshot.to_owned()));
        }
        self
    }

    /// Replaces the hint of a refusal.
    pub fn with_hint(mut self, text: String) -> Self {
        if let Self::Refused { body, .. } = &mut self {
            body.hint = Some(text);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_what_the_request_was_about() {
        let web = Subject::Sandbox("web".into());
        let refused = |code| {
            let body = ErrorBody { code, message: "x".into(), hint: None, request_id: "r".into() };
            Error::Refused { body: Box::new(body), about: Some(web.clone()) }
        };
        assert_eq!(refused(ErrorCode::SandboxNotFound).missing(), Some(&web));
        assert_eq!(refused(ErrorCode::SnapshotNotFound).missing(), None);
    }
}
