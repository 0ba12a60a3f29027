//! What can go wrong with the network.

use std::io;
use std::sync::Arc;

use super::names::{BLOCKS, SLOTS};

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("{0:?} is no tag: eight lower-case letters and digits are")]
    Tag(String),
    #[error("could not {action}")]
    Host {
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("could not {action}")]
    Kernel {
        action: &'static str,
        #[source]
        source: rtnetlink::Error,
    },
    #[error("nft refused the firewall rules: {0}")]
    Rules(String),
    #[error("all {BLOCKS} blocks of addresses of this host are in use by other installations")]
    NoBlock,
    #[error("all {SLOTS} network slots are in use")]
    Full,
    #[error("network slot {0} is in use")]
    InUse(u16),
    #[error("there is no network slot {0}")]
    Missing(u16),
    #[error("a link vanished while it was set up")]
    Vanished,
    #[error("no network slot became ready in time")]
    Late,
    #[error("the network is closed")]
    Closed,
    #[error("could not make a network slot")]
    Slot {
        #[source]
        source: Arc<NetworkError>,
    },
}

impl NetworkError {
    /// `NetworkError::host("run nft")(error)`, for `map_err`.
    pub(super) fn host(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Host { action, source }
    }

    pub(super) fn kernel(action: &'static str) -> impl Fn(rtnetlink::Error) -> Self {
        move |source| Self::Kernel { action, source }
    }
}
