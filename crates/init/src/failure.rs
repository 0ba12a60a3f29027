//! Why the machine can't begin.

use std::fmt;
use std::io;

/// One line for people.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(words: impl Into<String>) -> Self {
        Self(words.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Says what it was that the kernel refused.
pub(crate) trait Told<T> {
    fn told(self, what: impl fmt::Display) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> Told<T> for Result<T, E> {
    fn told(self, what: impl fmt::Display) -> Result<T, Failure> {
        self.map_err(|error| Failure(format!("{what}: {}", error.into())))
    }
}
