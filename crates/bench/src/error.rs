//! Why something could not be measured.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Client(#[from] torpor_client::Error),
    /// Something on this computer: a file, a process.
    #[error("{what}")]
    Local {
        what: String,
        #[source]
        source: io::Error,
    },
    /// What is measured does not do what it should.
    #[error("{0}")]
    Failed(String),
    /// The arguments don't fit together.
    #[error("{0}")]
    Usage(&'static str),
    /// Who asked for it does not want it any more.
    #[error("interrupted")]
    Interrupted,
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn local(what: impl Into<String>, source: io::Error) -> Self {
        Self::Local { what: what.into(), source }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into())
    }

    pub(crate) fn garbled(what: &str, why: impl ToString) -> Self {
        torpor_client::Error::garbled(what, why).into()
    }
}
