//! What every guest gets besides what its image says: CA certificates and variables.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};
use torpor_lifecycle::GuestDefaults;

use super::ConfigError;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
/// Bytes of all certificates that one guest is told: half of what fits a message to its agent.
const EXTRA_CA_MAX: usize = 64 * 1024;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GuestConfig {
    /// Files of CA certificates (PEM) that everybody inside trusts.
    pub extra_ca: Vec<PathBuf>,
    pub env: Variables,
    /// More of both for sandboxes of one image.
    pub images: BTreeMap<String, ImageGuestConfig>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImageGuestConfig {
    pub extra_ca: Vec<PathBuf>,
    pub env: Variables,
}

/// Shown by their names only: the address of a proxy may have a password in it.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Variables(BTreeMap<String, String>);

impl fmt::Debug for Variables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl GuestConfig {
    /// With the certificates that the files have now.
    pub(crate) fn load(&self) -> Result<GuestDefaults, ConfigError> {
        let Self { extra_ca, env, images } = self;
        let all = loaded("guest", extra_ca, env)?;
        let mut of_images = BTreeMap::new();
        for (name, ImageGuestConfig { extra_ca, env }) in images {
            let key = format!("guest.images.{name:?}");
            let defaults = loaded(&key, extra_ca, env)?;
            let size = |defaults: &GuestDefaults| defaults.extra_ca.iter().map(String::len).sum();
            let sizes: [usize; 2] = [size(&all), size(&defaults)];
            if sizes.iter().sum::<usize>() > EXTRA_CA_MAX {
                return wrong(format!("{key}.extra_ca: {TOO_MANY}"));
            }
            of_images.insert(name.clone(), defaults);
        }
        Ok(GuestDefaults { images: of_images, ..all })
    }
}

const TOO_MANY: &str = "these are too many certificates, more than 64 KiB with those of all guests";

fn wrong<T>(text: String) -> Result<T, ConfigError> {
    Err(ConfigError::Senseless(text))
}

fn loaded(key: &str, files: &[PathBuf], env: &Variables) -> Result<GuestDefaults, ConfigError> {
    let fine = |name: &str| !name.is_empty() && !name.contains(['=', '\0']);
    if let Some(name) = env.0.keys().find(|name| !fine(name)) {
        return wrong(format!("{key}.env: {name:?} is no name of a variable"));
    }
    if let Some((name, _)) = env.0.iter().find(|(_, value)| value.contains('\0')) {
        return wrong(format!("{key}.env.{name} has a zero byte in it"));
    }
    let mut extra_ca = Vec::new();
    for file in files {
        let found = certificates(file);
        extra_ca.extend(
            found.or_else(|why| wrong(format!("{key}.extra_ca: {}: {why}", file.display())))?,
        );
    }
    if extra_ca.iter().map(String::len).sum::<usize>() > EXTRA_CA_MAX {
        return wrong(format!("{key}.extra_ca: {TOO_MANY}"));
    }
    Ok(GuestDefaults { extra_ca, env: env.0.clone(), images: BTreeMap::new() })
}

/// The certificates of a file, one text each; or what is wrong with it.
fn certificates(file: &Path) -> Result<Vec<String>, String> {
    if !file.is_absolute() {
        return Err("the path must be absolute".to_owned());
    }
    let text = std::fs::read(file).map_err(|error| format!("it can't be read: {error}"))?;
    let text = String::from_utf8_lossy(&text);
    if text.contains("PRIVATE KEY-----") {
        return Err("it has a private key in it, which no guest may see; name a file that has \
                    certificates only"
            .to_owned());
    }
    let mut found = Vec::new();
    for part in text.split(BEGIN).skip(1) {
        let (body, _) = part.split_once(END).ok_or("a certificate in it does not end")?;
        let pem = format!("{BEGIN}{body}{END}\n");
        let number = found.len() + 1;
        let parsed = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| e.to_string());
        let usable = parsed
            .and_then(|der| RootCertStore::empty().add(der).map_err(|error| error.to_string()));
        usable.map_err(|error| format!("certificate {number} in it can't be used: {error}"))?;
        found.push(pem);
    }
    if found.is_empty() {
        return Err("it has no certificate (PEM) in it".to_owned());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem() -> String {
        let key = rcgen::KeyPair::generate().unwrap();
        rcgen::CertificateParams::default().self_signed(&key).unwrap().pem()
    }

    fn config(toml: &str) -> GuestConfig {
        figment::Figment::from(<figment::providers::Toml as figment::providers::Format>::string(
            toml,
        ))
        .extract()
        .unwrap()
    }

    #[test]
    fn certificates_and_variables_are_for_all_guests_or_for_those_of_an_image() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one.pem"), dir.path().join("two.pem"));
        std::fs::write(&one, format!("# of the office\n{}\n{}", pem(), pem())).unwrap();
        std::fs::write(&two, pem()).unwrap();
        let config = config(&format!(
            "extra_ca = [{one:?}]\n[env]\nHTTPS_PROXY = 'http://me:hunter2@p:3128'\n\
             [images.'team/web:2']\nextra_ca = [{two:?}]\nenv = {{ A = 'b' }}\n"
        ));
        let defaults = config.load().unwrap();
        assert_eq!(defaults.extra_ca.len(), 2);
        assert!(defaults.extra_ca.iter().all(|pem| pem.starts_with(BEGIN)));
        assert_eq!(defaults.images["team/web:2"].extra_ca.len(), 1);
        assert_eq!(defaults.images["team/web:2"].env["A"], "b");
        let shown = format!("{config:?}");
        assert!(shown.contains("HTTPS_PROXY") && !shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn a_bad_file_is_an_error_that_names_the_key_the_file_and_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.pem");
        let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
        let cut = pem().replace(END, "");
        let garbled = format!("{BEGIN}\nAAAA\n{END}\n");
        for (content, why) in [
            (None, "can't be read"),
            (Some("hello".to_owned()), "no certificate"),
            (Some(format!("{}{key}", pem())), "private key"),
            (Some(cut), "does not end"),
            (Some(garbled), "can't be used"),
            (Some(pem().repeat(200)), "too many"),
        ] {
            let _ = std::fs::remove_file(&file);
            if let Some(content) = content {
                std::fs::write(&file, content).unwrap();
            }
            let config = GuestConfig { extra_ca: vec![file.clone()], ..GuestConfig::default() };
            let error = config.load().map(drop).unwrap_err().to_string();
            assert!(error.contains("guest.extra_ca") && error.contains(why), "{error}");
        }
        let config = GuestConfig { extra_ca: vec!["ca.pem".into()], ..GuestConfig::default() };
        assert!(config.load().map(drop).unwrap_err().to_string().contains("absolute"));
        let error = self::config("[env]\n'A=B' = 'c'\n").load().map(drop).unwrap_err().to_string();
        assert!(error.contains("guest.env"), "{error}");
    }
}
