//! Who we are for registries: logins that are kept here, then those of Docker.

use async_trait::async_trait;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::RegistryLogin;
use torpor_registry::{Credentials, DockerConfig, Error as RegistryError, Login, Reference};
use torpor_store::Vault;

use super::told;
use crate::Service;
use crate::error::{Error, Result, StoreError};

/// Logins of the vault; then what `docker login` left.
pub(super) struct Logins {
    pub(super) vault: Vault,
    pub(super) docker: Option<DockerConfig>,
}

#[async_trait]
impl Credentials for Logins {
    async fn find(&self, registry: &str) -> torpor_registry::Result<Option<Login>> {
        let failed = |error: StoreError| RegistryError::Credentials {
            registry: registry.to_owned(),
            why: error.to_string(),
        };
        if let Some((username, password)) = self.vault.login(registry).await.map_err(failed)? {
            return Ok(Some(Login::Password { username, password }));
        }
        match &self.docker {
            Some(docker) => docker.find(registry).await,
            None => Ok(None),
        }
    }
}

/// Keeps a login that the registry takes.
pub async fn log_in(
    app: &Service,
    registry: &str,
    username: String,
    password: String,
) -> Result<RegistryLogin> {
    let registry = host(registry)?;
    let login = Login::Password { username: username.clone(), password: password.clone() };
    app.registries.client.check_login(&registry, &login).await.map_err(told)?;
    app.vault.set_login(&registry, &username, &password).await?;
    app.registries.client.forget(&registry);
    Ok(RegistryLogin { registry, username })
}

pub async fn log_out(app: &Service, registry: &str) -> Result<()> {
    let registry = host(registry)?;
    app.registries.client.forget(&registry);
    if app.vault.remove_login(&registry).await? {
        return Ok(());
    }
    Err(Error::new(ErrorCode::NotFound, format!("there is no login for {registry}")))
}

pub async fn logins(app: &Service) -> Result<Vec<RegistryLogin>> {
    let logins = app.vault.logins().await?.into_iter();
    Ok(logins.map(|(registry, username)| RegistryLogin { registry, username }).collect())
}

/// The host as references have it.
fn host(registry: &str) -> Result<String> {
    let plain = registry.trim_start_matches("https://").trim_end_matches('/');
    let parsed = format!("{plain}/x").parse::<Reference>().map_err(told)?;
    match parsed.repository.as_str() {
        "x" | "library/x" => Ok(parsed.registry),
        _ => Err(Error::invalid(format!("{registry:.200} is no host of a registry"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_are_called_by_their_host() {
        for (text, registry) in [
            ("ghcr.io", "ghcr.io"),
            ("https://ghcr.io/", "ghcr.io"),
            ("docker.io", "docker.io"),
            ("index.docker.io", "docker.io"),
            ("localhost:5000", "localhost:5000"),
        ] {
            assert_eq!(host(text).unwrap(), registry, "{text}");
        }
        for text in ["", "ghcr", "a.io/b", "http://a.io", "a.io:x", "u:p@a.io"] {
            assert!(host(text).is_err(), "{text}");
        }
    }
}
