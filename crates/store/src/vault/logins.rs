//! Logins of registries: the password is sealed like the value of a secret, and never given to anybody but
//! who talks to that registry.

use torpor_lifecycle::store::StoreError;

use super::Vault;

/// Longest password or token; those of clouds have some thousand bytes.
const PASSWORD_MAX: usize = 32 * 1024;
const NAME_MAX: usize = 255;

impl Vault {
    /// Replaces the login of a registry.
    pub async fn set_login(
        &self,
        registry: &str,
        username: &str,
        password: &str,
    ) -> Result<(), StoreError> {
        let bad = |text: &str| Err(StoreError::Invalid(text.to_owned()));
        let plain = |text: &str| !text.chars().any(char::is_control);
        if username.is_empty() || username.len() > NAME_MAX || !plain(username) {
            return bad("a user of a registry has from 1 to 255 printable characters");
        }
        if password.is_empty() || password.len() > PASSWORD_MAX || !plain(password) {
            return bad("a password has from 1 to 32768 printable characters");
        }
        let sealed = self.key.encrypt(password, &about(registry, username))?;
        self.ledger.put_login(registry, username, sealed).await
    }

    /// Who we are for a registry, with the password.
    pub async fn login(&self, registry: &str) -> Result<Option<(String, String)>, StoreError> {
        let Some((username, sealed)) = self.ledger.login(registry).await? else { return Ok(None) };
        let password = self.key.decrypt(&sealed, &about(registry, &username)).ok_or_else(|| {
            StoreError::Invalid(format!(
                "the password for {registry} can't be decrypted: it was set under another secret \
                 key; log in again"
            ))
        })?;
        Ok(Some((username, password)))
    }

    /// Registries with who we are there, by registry.
    pub async fn logins(&self) -> Result<Vec<(String, String)>, StoreError> {
        self.ledger.logins().await
    }

    /// Whether there was one.
    pub async fn remove_login(&self, registry: &str) -> Result<bool, StoreError> {
        self.ledger.drop_login(registry).await
    }
}

/// What a password belongs to: it does not open for another registry or user.
fn about(registry: &str, username: &str) -> String {
    format!("login\n{registry}\n{username}")
}
