//! Which addresses stand for a registry: its mirrors, then itself; and what an address may lead to.

use http::Uri;

use crate::reference::HUB;
use crate::settings::RegistrySettings;
use crate::wire::Wire;
use crate::{Client, Error, Reference, Result};

/// Where the hub really is.
const HUB_HOST: &str = "registry-1.docker.io";

/// An address that stands for a registry: itself, or a mirror.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// For people, and for credentials.
    pub(crate) name: String,
    pub(crate) base: String,
    /// Before the repository, with a slash at its end.
    prefix: String,
    pub(crate) plain: bool,
    pub(crate) wire: Wire,
}

impl Client {
    /// The registry's mirrors, then itself.
    pub(crate) fn endpoints(&self, registry: &str) -> Result<Vec<Endpoint>> {
        let settings = self.shared.settings.registries.get(registry);
        let mirrors = settings.map_or(&[][..], |settings| &settings.mirrors);
        let mirrors = mirrors.iter().map(|mirror| self.mirror(mirror));
        mirrors.chain([self.own(registry)]).collect()
    }

    /// The registry itself.
    pub(crate) fn own(&self, registry: &str) -> Result<Endpoint> {
        let fallback = RegistrySettings::default();
        let settings = self.shared.settings.registries.get(registry).unwrap_or(&fallback);
        let here = is_here(registry) && settings.ca_file.is_none();
        let plain = settings.plain_http.unwrap_or(here);
        let host = if registry == HUB { HUB_HOST } else { registry };
        let scheme = if plain { "http" } else { "https" };
        Ok(Endpoint {
            name: registry.to_owned(),
            base: format!("{scheme}://{host}"),
            prefix: String::new(),
            plain,
            wire: Wire::new(settings.ca_file.as_deref(), self.shared.settings.patience)?,
        })
    }

    fn mirror(&self, text: &str) -> Result<Endpoint> {
        let (scheme, rest) = text.split_once("://").unwrap_or(("https", text));
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let bad = || Error::Settings(format!("{text:?} is no address of a mirror"));
        if !["http", "https"].contains(&scheme)
            || format!("{scheme}://{host}").parse::<Uri>().is_err()
        {
            return Err(bad());
        }
        let mut endpoint = self.own(host)?;
        endpoint.plain = scheme == "http";
        endpoint.base = format!("{scheme}://{host}");
        let path = path.trim_matches('/');
        endpoint.prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
        Ok(endpoint)
    }
}

/// Before anybody was asked.
pub(crate) fn no_endpoint() -> Error {
    Error::Settings("there is nobody to ask".to_owned())
}

impl Endpoint {
    /// What went wrong here; the next is asked, and what the registry itself says counts.
    pub(crate) fn passed_over(&self, of: &Reference, error: Error) -> Error {
        if self.name != of.registry {
            tracing::warn!(mirror = self.name, %error, "a mirror does not help");
        }
        error
    }

    pub(crate) fn url(&self, repository: &str, kind: &str, target: &str) -> String {
        format!("{}/v2/{}{repository}/{kind}/{target}", self.base, self.prefix)
    }

    pub(crate) fn unreachable(&self, why: impl Into<String>) -> Error {
        Error::Unreachable { registry: self.name.clone(), why: why.into() }
    }

    pub(crate) fn garbled(&self, why: &str) -> Error {
        Error::Garbled { registry: self.name.clone(), why: why.to_owned() }
    }

    /// An address that it names, unless that is less protected than itself.
    pub(crate) fn allowed(&self, url: &str) -> Result<Uri> {
        let uri: Uri =
            url.parse().map_err(|_| self.garbled("it leads to an impossible address"))?;
        match uri.scheme_str() {
            Some("https") => Ok(uri),
            Some("http") if self.plain => Ok(uri),
            Some(_) | None => Err(self.garbled("it leads from https to another protocol")),
        }
    }
}

/// Whether a host is this one.
fn is_here(registry: &str) -> bool {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    host == "localhost" || host.parse::<std::net::Ipv4Addr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Credentials, Login, Settings};

    struct Nobody;

    #[async_trait::async_trait]
    impl Credentials for Nobody {
        async fn find(&self, _: &str) -> Result<Option<Login>> {
            Ok(None)
        }
    }

    fn client(registry: &str, settings: RegistrySettings) -> Result<Client> {
        let registries = [(registry.to_owned(), settings)].into();
        Client::new(Settings { registries, ..Settings::default() }, Box::new(Nobody))
    }

    #[test]
    fn a_registry_with_tls_leads_nowhere_without() {
        let client = client("x.io", RegistrySettings::default()).unwrap();
        let endpoint = client.own("x.io").unwrap();
        assert_eq!(endpoint.base, "https://x.io");
        for url in ["http://x.io/a", "ftp://x.io/a", "/a", "file:///etc/passwd"] {
            assert!(endpoint.allowed(url).is_err(), "{url}");
        }
        assert!(endpoint.allowed("https://cdn.x.io/a?b=c").is_ok());
    }

    #[test]
    fn plain_is_what_is_said_to_be_or_on_this_host() {
        let plain = |registry: &str, settings: RegistrySettings| {
            client(registry, settings).unwrap().own(registry).unwrap().plain
        };
        assert!(plain("localhost:5000", RegistrySettings::default()));
        assert!(plain("127.0.0.1:5000", RegistrySettings::default()));
        assert!(!plain("registry.x", RegistrySettings::default()));
        let said = RegistrySettings { plain_http: Some(true), ..RegistrySettings::default() };
        assert!(plain("registry.x", said));
        let said = RegistrySettings { plain_http: Some(false), ..RegistrySettings::default() };
        assert!(!plain("localhost:5000", said));
    }

    #[test]
    fn mirrors_are_asked_first_and_the_hub_has_its_own_address() {
        let mirrors = vec!["m.x".to_owned(), "http://n.x:5000/proxy/".to_owned()];
        let client =
            client(HUB, RegistrySettings { mirrors, ..RegistrySettings::default() }).unwrap();
        let urls: Vec<_> =
            client.endpoints(HUB).unwrap().iter().map(|e| e.url("a", "blobs", "d")).collect();
        assert_eq!(
            urls,
            [
                "https://m.x/v2/a/blobs/d",
                "http://n.x:5000/v2/proxy/a/blobs/d",
                "https://registry-1.docker.io/v2/a/blobs/d"
            ]
        );
    }

    #[test]
    fn senseless_settings_are_refused() {
        let mirrors = vec!["ftp://m.x".to_owned()];
        assert!(
            client("a.x", RegistrySettings { mirrors, ..RegistrySettings::default() }).is_err()
        );
        let ca_file = Some("/nowhere.pem".into());
        assert!(
            client("a.x", RegistrySettings { ca_file, ..RegistrySettings::default() }).is_err()
        );
    }
}
