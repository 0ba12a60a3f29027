//! TCP to a port inside a running sandbox.

use std::time::Duration;

use torpor_lifecycle::guest::{GuestError, Stream, unexpected};
use torpor_protocol::guest::{Reply, Request};

use crate::Result;
use crate::processes::Awake;

/// How long a server inside may take to accept.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(30);

/// A TCP connection to loopback inside.
pub async fn connect(awake: &Awake, port: u16) -> Result<Stream> {
    let request = Request::Connect { port };
    let connect = async {
        let mut stream = awake.lease.guest().open(&request).await?;
        let Reply::Done = stream.reply().await? else { return Err(unexpected(&request)) };
        Ok(stream)
    };
    let connected = tokio::time::timeout(CONNECT_DEADLINE, connect).await;
    Ok(connected.map_err(|_| GuestError::Timeout(CONNECT_DEADLINE))??)
}
