//! Failures as the daemon sees them: a code from a closed list, and words for people.

use std::fmt::Display;
use std::io;

use rustix::io::Errno;
use torpor_protocol::guest::{Failure, FailureCode};

/// Longest message: room for a path, and far from filling a packet even if all of it is escaped.
const MESSAGE_MAX: usize = 6 * 1024;

pub(crate) fn failure(code: FailureCode, message: impl Into<String>) -> Failure {
    let mut message = message.into();
    if message.len() > MESSAGE_MAX {
        message.truncate(message.floor_char_boundary(MESSAGE_MAX));
        message.push('…');
    }
    Failure { code, message }
}

/// `what` could not be done because the kernel said `error`.
pub(crate) fn refused(what: impl Display, error: impl Into<io::Error>) -> Failure {
    let error = error.into();
    failure(code_of(&error), format!("{what}: {}", reason(&error)))
}

/// `refused`, for `map_err`.
pub(crate) fn cannot<E: Into<io::Error>>(what: impl Display) -> impl FnOnce(E) -> Failure {
    move |error| refused(what, error)
}

fn code_of(error: &io::Error) -> FailureCode {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => FailureCode::NoSuchFile,
        Some(Errno::NOTDIR) => FailureCode::NotADirectory,
        Some(Errno::ISDIR) => FailureCode::IsADirectory,
        Some(Errno::EXIST) => FailureCode::Exists,
        Some(Errno::NOTEMPTY) => FailureCode::NotEmpty,
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => FailureCode::Denied,
        Some(Errno::NOSPC | Errno::DQUOT) => FailureCode::DiskFull,
        Some(Errno::MFILE | Errno::NFILE | Errno::AGAIN) => FailureCode::Limit,
        Some(_) => FailureCode::Io,
        None if error.kind() == io::ErrorKind::InvalidInput => FailureCode::Invalid,
        None => FailureCode::Io,
    }
}

/// The kernel's words in lower case, without the number that Rust adds.
pub(crate) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_lowercase().to_string()).unwrap_or_default();
    first + letters.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_error_reads_like_a_sentence() {
        let failed = refused("/x", Errno::NOENT);
        assert_eq!(failed.code, FailureCode::NoSuchFile);
        assert_eq!(failed.message, "/x: no such file or directory");
    }

    #[test]
    fn a_message_is_cut_between_characters() {
        let failed = failure(FailureCode::Io, "é".repeat(MESSAGE_MAX));
        assert!(failed.message.len() <= MESSAGE_MAX + '…'.len_utf8());
    }
}
