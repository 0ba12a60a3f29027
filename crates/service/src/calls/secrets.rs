//! Secrets: their values go in and never come out.

use torpor_lifecycle::ledger::{PAGE, everything};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::Secret;
use torpor_protocol::{ErrorCode, HostBinding, SecretName};

use crate::Service;
use crate::error::{Error, Result};

/// All of them, read by pages; sorted by name.
pub async fn all(app: &Service) -> Result<Vec<Secret>> {
    let page =
        |after: Option<SecretName>| async move { app.vault.list(after.as_ref(), PAGE).await };
    Ok(everything(page, |secret| secret.name.clone()).await?)
}

pub async fn find(app: &Service, name: &SecretName) -> Result<Secret> {
    app.vault.find(name).await?.ok_or_else(|| missing(name.as_str()))
}

/// A secret that is not there yet.
pub async fn create(app: &Service, name: &SecretName, value: &str) -> Result<Secret> {
    if app.vault.find(name).await?.is_some() {
        let text = format!("there is a secret {name} already");
        return Err(Error::new(ErrorCode::AlreadyExists, text));
    }
    set(app, name, value, None).await
}

/// Gives a secret a value, whether it is there or not. `hosts`: as before, unless they are said.
pub async fn set(
    app: &Service,
    name: &SecretName,
    value: &str,
    hosts: Option<Vec<HostBinding>>,
) -> Result<Secret> {
    Ok(app.vault.set(name, value, hosts).await?)
}

pub async fn remove(app: &Service, name: &SecretName) -> Result<()> {
    if app.vault.remove(name).await? { Ok(()) } else { Err(missing(name.as_str())) }
}

/// There is no secret of this name, or none can have it.
pub fn missing(name: &str) -> Error {
    StoreError::NoSuchSecret(name.chars().take(80).collect()).into()
}
