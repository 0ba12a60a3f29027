//! Why a save can't be read: it is cut or damaged, or another build wrote it.

use std::io;

use torpor_lifecycle::engine::EngineError;

#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("{file} can't be read")]
    Io {
        file: &'static str,
        #[source]
        source: io::Error,
    },
    /// The bytes are not what they have to be, whoever wrote them.
    #[error("{what}, at byte {at}")]
    Damaged { what: &'static str, at: usize },
    /// The parts are whole but contradict each other.
    #[error("{0}")]
    Absurd(String),
    /// In order, and more than is good for the memory of a host.
    #[error("{0}")]
    TooMuch(String),
    /// Whole, but not in the shape that the known builds of runsc give it.
    #[error("{0}")]
    Shape(String),
}

impl Fault {
    /// Whether a file ended where there should be more: what is in it is not what was expected.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof)
    }
}

impl From<Fault> for EngineError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Shape(what) => Self::Unsupported {
                engine: "gvisor",
                what: format!("read the files of a machine that this build of runsc saved: {what}"),
            },
            Fault::TooMuch(what) => Self::GuestFiles(what),
            Fault::Io { .. } | Fault::Damaged { .. } | Fault::Absurd(_) => {
                Self::failed("read the files of a saved machine")(fault)
            }
        }
    }
}
