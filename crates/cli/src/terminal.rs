//! The terminal we were started in: its size, questions, and other modes for as long as a guard lives.

use std::io::{self, BufRead, IsTerminal};

use rustix::stdio;
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use torpor_protocol::guest::TerminalSize;

use crate::error::{Error, Result};
use crate::signals::Signals;

/// What a terminal has that does not say its size.
const FALLBACK: TerminalSize = TerminalSize { cols: 80, rows: 24 };

pub(crate) fn stdin_is_terminal() -> bool {
    io::stdin().is_terminal()
}

/// Asks; an error if nobody is there who could answer.
pub(crate) fn confirmed(question: &str) -> Result<bool> {
    if !stdin_is_terminal() {
        return Err(Error::Usage {
            message: format!("nobody is there to be asked: {question}"),
            hint: Some("say -y if you mean it".to_owned()),
        });
    }
    crate::output::note(&format!("{question} [y/N]"));
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| Error::local("read the answer", error))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// A line that is typed and not shown. The terminal comes back also if a signal ends the wait.
pub(crate) async fn hidden_line(question: &str) -> Result<String> {
    let mut signals = Signals::new()?;
    let _quiet = Modes::no_echo()?;
    crate::output::note(question);
    let read = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).map(|_| line)
    });
    let read = tokio::select! {
        read = read => read,
        left = signals.next() => return Err(left),
    };
    let read = read.unwrap_or_else(|error| Err(io::Error::other(error)));
    read.map_err(|error| Error::local("read the answer", error))
}

/// The size of our terminal; 80 × 24 if there is none.
pub(crate) fn size() -> TerminalSize {
    let sizes = [termios::tcgetwinsize(stdio::stdout()), termios::tcgetwinsize(stdio::stdin())];
    sizes
        .into_iter()
        .flatten()
        .find(|size| size.ws_col > 0 && size.ws_row > 0)
        .map_or(FALLBACK, |size| TerminalSize { cols: size.ws_col, rows: size.ws_row })
}

/// Other modes while this lives; dropping it, also in a panic, brings back what was.
#[derive(Debug)]
pub(crate) struct Modes {
    before: Termios,
}

impl Modes {
    /// Keys go through as they are (ctrl-c too). None if standard input is no terminal.
    pub(crate) fn raw() -> Result<Option<Self>> {
        if !stdin_is_terminal() {
            return Ok(None);
        }
        Self::enter(OptionalActions::Now, Termios::make_raw).map(Some)
    }

    /// What is typed is not shown; the end of a line is.
    fn no_echo() -> Result<Self> {
        // What was typed before the question was shown is no answer.
        Self::enter(OptionalActions::Flush, |modes| {
            modes.local_modes.remove(LocalModes::ECHO);
            modes.local_modes.insert(LocalModes::ECHONL);
        })
    }

    fn enter(actions: OptionalActions, change: impl FnOnce(&mut Termios)) -> Result<Self> {
        let failed = |error: rustix::io::Errno| Error::local("set up the terminal", error.into());
        let before = termios::tcgetattr(stdio::stdin()).map_err(failed)?;
        let mut modes = before.clone();
        change(&mut modes);
        let guard = Self { before };
        termios::tcsetattr(stdio::stdin(), actions, &modes).map_err(failed)?;
        Ok(guard)
    }
}

impl Drop for Modes {
    fn drop(&mut self) {
        // Nothing is left to do if the terminal is gone.
        let _ = termios::tcsetattr(stdio::stdin(), OptionalActions::Now, &self.before);
    }
}
