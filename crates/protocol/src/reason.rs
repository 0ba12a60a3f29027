//! Why a sandbox is in a state that nobody asked for, or work failed: closed lists for programs, a sentence
//! for people.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a sandbox is as it is, for programs. The status has the sentence for people beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReasonCode {
    /// Creating: it waits for capacity on its host.
    Queued,
    /// Failed: its machine could not be started.
    StartFailed,
    /// Failed: its entrypoint can't be started.
    BadEntrypoint,
    /// Failed: its machine died, and nothing of it was ever saved.
    MachineLost,
    /// Failed: its machine died, and its last save can't be used.
    SaveUnusable,
    /// Standby: its machine died, and it is back as it was when last saved.
    Recovered,
    /// Standby: it could not be woken. The next request tries again.
    WakeFailed,
    /// Standby: it could not be written to disk, and stays in memory.
    SaveFailed,
    /// Terminated: it reached its maximum age.
    MaxAge,
    /// Terminated: it reached its date.
    Expired,
    /// Terminated: nobody used it for its idle time.
    Idle,
    /// Terminated: there was no capacity for it within the time that it could wait.
    NoCapacity,
    /// Terminated: it was deleted while it waited for capacity.
    Cancelled,
}

/// Why a sandbox has no machine and can't get one by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum FailureReason {
    StartFailed { cause: String },
    BadEntrypoint { cause: String },
    MachineLost { cause: String },
    SaveUnusable { cause: String },
}

impl FailureReason {
    pub fn code(&self) -> ReasonCode {
        match self {
            Self::StartFailed { .. } => ReasonCode::StartFailed,
            Self::BadEntrypoint { .. } => ReasonCode::BadEntrypoint,
            Self::MachineLost { .. } => ReasonCode::MachineLost,
            Self::SaveUnusable { .. } => ReasonCode::SaveUnusable,
        }
    }
}

impl fmt::Display for FailureReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StartFailed { cause } | Self::SaveUnusable { cause } => f.write_str(cause),
            Self::BadEntrypoint { cause } => write!(f, "its entrypoint can't be started: {cause}"),
            Self::MachineLost { cause } => write!(f, "{cause}; files and memory are gone"),
        }
    }
}

/// Why a snapshot, a build of an image or the last refill of a pool failed, for programs. The sentence for
/// people is in `message`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum WorkFailure {
    /// The daemon ended before it did.
    Interrupted,
    /// The host has not got what it needs: memory, disk, addresses.
    NoCapacity,
    /// What it needs did not arrive in time.
    TimedOut,
    /// A step of it failed.
    Failed,
}

/// How a sandbox lost its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LossReason {
    /// It ended by itself; the engine says how.
    Exited(String),
    AgentGone,
    /// Its agent did not answer: why.
    NoAnswer(String),
    DaemonAway,
    DaemonBug,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(how) | Self::NoAnswer(how) => f.write_str(how),
            Self::AgentGone => f.write_str("its agent broke off the channel"),
            Self::DaemonAway => f.write_str("its machine was lost while the daemon was away"),
            Self::DaemonBug => f.write_str("a bug in the daemon; its log has the details"),
        }
    }
}

/// Why a sandbox ended although nobody deleted it, or before it ever ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// It reached its maximum age.
    MaxAge,
    /// It reached its date.
    Expired,
    /// Nobody used it for its idle time.
    Idle,
    /// There was no capacity for it within the time that it could wait.
    NoCapacity,
    /// It was deleted while it waited for capacity.
    Cancelled,
}

impl EndReason {
    const ALL: [Self; 5] =
        [Self::MaxAge, Self::Expired, Self::Idle, Self::NoCapacity, Self::Cancelled];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::MaxAge => "max_age",
            Self::Expired => "expired",
            Self::Idle => "idle",
            Self::NoCapacity => "no_capacity",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn code(self) -> ReasonCode {
        match self {
            Self::MaxAge => ReasonCode::MaxAge,
            Self::Expired => ReasonCode::Expired,
            Self::Idle => ReasonCode::Idle,
            Self::NoCapacity => ReasonCode::NoCapacity,
            Self::Cancelled => ReasonCode::Cancelled,
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MaxAge => "it reached its maximum age",
            Self::Expired => "it reached its date",
            Self::Idle => "nobody used it for its idle time",
            Self::NoCapacity => "there was no room for it on this host within its time",
            Self::Cancelled => "it was deleted while it waited for room",
        })
    }
}

impl FromStr for EndReason {
    type Err = UnknownReason;

    fn from_str(text: &str) -> Result<Self, UnknownReason> {
        let found = Self::ALL.into_iter().find(|reason| reason.as_str() == text);
        found.ok_or_else(|| UnknownReason(text.to_owned()))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no reason {0:?} for an end")]
pub struct UnknownReason(String);

/// All that a status can have as its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatusReason {
    Queued,
    Failed(FailureReason),
    Recovered(LossReason),
    WakeFailed { cause: String },
    SaveFailed { cause: String },
    Ended(EndReason),
}

impl StatusReason {
    pub fn code(&self) -> ReasonCode {
        match self {
            Self::Queued => ReasonCode::Queued,
            Self::Failed(failure) => failure.code(),
            Self::Recovered(_) => ReasonCode::Recovered,
            Self::WakeFailed { .. } => ReasonCode::WakeFailed,
            Self::SaveFailed { .. } => ReasonCode::SaveFailed,
            Self::Ended(end) => end.code(),
        }
    }
}

impl fmt::Display for StatusReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queued => f.write_str("it waits for room on this host"),
            Self::Failed(failure) => failure.fmt(f),
            Self::Recovered(loss) => write!(f, "{loss}; it is back as it was when last saved"),
            Self::WakeFailed { cause } => write!(f, "it could not be woken: {cause}"),
            Self::SaveFailed { cause } => write!(f, "could not be saved: {cause}"),
            Self::Ended(end) => end.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_an_end_is_one_word_everywhere() {
        for reason in EndReason::ALL {
            assert_eq!(reason.as_str().parse(), Ok(reason));
            let word = serde_json::json!(reason.as_str());
            assert_eq!(serde_json::to_value(reason).unwrap(), word);
            assert_eq!(serde_json::to_value(reason.code()).unwrap(), word);
        }
        assert!("it was idle".parse::<EndReason>().is_err());
    }
}
