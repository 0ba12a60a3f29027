//! What client and server say to each other: one JSON value per packet.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use torpor_protocol::guest::Exit;

/// The largest packet. The kernel allows one word of a command as much, and the default buffers of
/// sockets hold it.
pub(super) const PACKET_MAX: usize = 128 * 1024;

/// The client's first packet, which carries its stdin, stdout and stderr.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    pub(super) command: Vec<String>,
    pub(super) cwd: String,
    /// All of the command's environment.
    pub(super) env: BTreeMap<String, String>,
    /// Whom to become.
    pub(super) user: String,
}

/// Every other packet of the client.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    Signal(i32),
}

/// What the server says, in this order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Word {
    /// The wish may come.
    Ready,
    /// The last word, why there is no process.
    Refused(String),
    /// Its pid.
    Started(u32),
    /// The last word.
    Exited(Exit),
}
