//! Staying with a process however often the way to it breaks: its sandbox falls asleep, the host has no room to wake
//! it, the agent is slow. None of these ends the process, so none of them says how it ended.

use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::{Refusal, Sandbox};
use torpor_protocol::ErrorCode;

use super::Awake;
use crate::Service;
use crate::error::{Error, Result};

/// So long it may take until a sandbox can be entered: a full host gets room within that, or never.
const ENTER_MAX: Duration = Duration::from_secs(60 * 60);
/// How often the way may break before a sandbox is given up. Who breaks it is the guest, or puts it to sleep again
/// and again.
const BREAKS_MAX: u32 = 100;
/// After so long it is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Enters one sandbox again and again.
pub(crate) struct Patience<'a> {
    service: &'a Service,
    sandbox: &'a Sandbox,
    broken: u32,
}

impl<'a> Patience<'a> {
    pub(crate) fn new(service: &'a Service, sandbox: &'a Sandbox) -> Self {
        Self { service, sandbox, broken: 0 }
    }

    /// Whether something broke before, which may have been done nevertheless.
    pub(crate) fn tried(&self) -> bool {
        self.broken > 0
    }

    /// Wakes it if need be, also if requests do not. An error says that it is gone, or was out of reach for too long.
    pub(crate) async fn enter(&self) -> Result<Awake> {
        let until = Instant::now() + ENTER_MAX;
        loop {
            match Awake::woken(self.service, self.sandbox.clone()).await {
                Err(error) if passes(error.code()) && Instant::now() < until => {
                    self.pause().await?;
                }
                entered => return entered,
            }
        }
    }

    /// Something inside broke off: returns when it may be tried again, or gives the error back if it is the last word.
    pub(crate) async fn after(&mut self, broke: Error) -> Result<()> {
        self.broken += 1;
        let refused = matches!(broke.guest(), Some(GuestError::Refused { .. }));
        let stops = broke.code() == ErrorCode::ShuttingDown;
        if refused || stops || self.broken > BREAKS_MAX {
            return Err(broke);
        }
        // Who was put to sleep can be woken at once.
        if broke.code() != ErrorCode::SandboxAsleep {
            self.pause().await?;
        }
        Ok(())
    }

    async fn pause(&self) -> Result<()> {
        let paused = self.service.stopping.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
        paused.ok_or_else(|| torpor_lifecycle::Error::from(Refusal::Stopping).into())
    }
}

/// Whether who can't enter now may later.
fn passes(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::SandboxAsleep | ErrorCode::CapacityReached | ErrorCode::Timeout)
}
