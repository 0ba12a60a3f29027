//! Removing things by their names, as several verbs do.

use std::fmt::Display;

use torpor_client::{Client, Route};
use torpor_protocol::ErrorCode;

use crate::error::Result;
use crate::output;

/// Removes each and prints it; with `force`, those that are `missing` are fine.
pub(super) async fn remove<T: Display>(
    client: &Client,
    names: &[T],
    route: impl Fn(&T) -> Route,
    force: bool,
    missing: ErrorCode,
) -> Result<()> {
    for name in names {
        match client.delete(&route(name)).await {
            Ok(()) => output::line(&output::plain(&name.to_string()))?,
            Err(error) if force && error.code() == Some(missing) => (),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
