//! Whoever wants us to end, for verbs that have to put something in order first.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::{Error, Result};

/// What a shell adds to the number of a signal.
const SIGNALLED: u8 = 128;

pub(crate) fn listen(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|error| Error::local("listen for signals", error))
}

/// SIGINT, SIGTERM and SIGHUP; from now on they do not end us by themselves.
#[derive(Debug)]
pub(crate) struct Signals {
    listeners: [(u8, Signal); 3],
}

impl Signals {
    pub(crate) fn new() -> Result<Self> {
        let listeners = [
            (2, listen(SignalKind::interrupt())?),
            (15, listen(SignalKind::terminate())?),
            (1, listen(SignalKind::hangup())?),
        ];
        Ok(Self { listeners })
    }

    /// The next one, as the silent end that it asks for.
    pub(crate) async fn next(&mut self) -> Error {
        let [interrupt, terminate, hangup] = &mut self.listeners;
        let number = tokio::select! {
            _ = interrupt.1.recv() => interrupt.0,
            _ = terminate.1.recv() => terminate.0,
            _ = hangup.1.recv() => hangup.0,
        };
        Error::Exit(SIGNALLED + number)
    }
}
