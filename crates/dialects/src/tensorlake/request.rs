//! What clients ask a sandbox or a pool to be, in our words. What can't be had is refused by name.

use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use torpor_protocol::api::{DEFAULT_IMAGE, Resize, Standby};
use torpor_protocol::{
    Destination, ErrorCode, Lifetime, Network, PortAccess, SandboxSpec, WebRule,
};
use torpor_service::Service;
use torpor_service::error::StoreError;
use torpor_web::error::ApiError;

use super::images::alias;

type Result<T> = std::result::Result<T, ApiError>;

/// What our default image is called here.
const SHOWN_DEFAULT: &str = "tensorlake/ubuntu-minimal";
/// The port of the API inside a sandbox, in Tensorlake's own machines.
const MANAGEMENT_PORT: u16 = 9501;
/// When an idle sandbox that does not say falls asleep or ends.
pub(super) const TIMEOUT_SECS: u64 = 600;

/// The refusal of what is not there in this version.
pub(super) fn unsupported(text: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::Unsupported, text)
}

// === Image ===

/// The image here that is asked for; `None`: our default.
pub(super) async fn image(service: &Service, asked: Option<String>) -> Result<Option<String>> {
    let Some(asked) = asked else { return Ok(None) };
    let small = asked.to_ascii_lowercase();
    match service.images.resolve(&small).await {
        Ok(_) => Ok(Some(small)),
        // A registry tells capital letters in tags.
        Err(StoreError::NoSuchImage(_)) => {
            Ok(Some(alias(&small).map_or(asked, |stands_for_it| stands_for_it.to_owned())))
        }
        Err(error) => Err(error.into()),
    }
}

/// An image as clients know it.
pub(super) fn shown_image(image: &str) -> String {
    let shown = if image == DEFAULT_IMAGE { SHOWN_DEFAULT } else { image };
    shown.to_owned()
}

// === Resources ===

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct ResourcesRequest {
    cpus: Option<f64>,
    memory_mb: Option<u64>,
    disk_mb: Option<u64>,
    /// What older packages call the disk; 0 is theirs for "not said".
    ephemeral_disk_mb: Option<u64>,
    gpus: Value,
    gpu_configs: Value,
}

impl ResourcesRequest {
    pub(super) fn to_resize(&self) -> Result<Resize> {
        if some(&self.gpus) || some(&self.gpu_configs) {
            return Err(unsupported("gpus: this host has no GPUs for sandboxes"));
        }
        let older = self.ephemeral_disk_mb.filter(|mb| *mb > 0);
        Ok(Resize { cpus: self.cpus, memory_mib: self.memory_mb, disk_mib: self.disk_mb.or(older) })
    }
}

/// Whether anything is asked for.
fn some(asked: &Value) -> bool {
    match asked {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        Value::Number(number) => number.as_u64() != Some(0),
        Value::Bool(_) | Value::String(_) | Value::Object(_) => true,
    }
}

// === Idle time ===

/// What becomes of a sandbox that nobody used for so long (0: nothing): one with a name falls asleep,
/// one without ends.
pub(super) fn idle(named: bool, secs: u64) -> (Lifetime, Standby) {
    let idle_ms = Some(secs.saturating_mul(1000)).filter(|ms| *ms > 0);
    let (sleeps_after, ends_after) = if named { (idle_ms, None) } else { (None, idle_ms) };
    let lifetime = Lifetime { expire_idle_ms: ends_after, ..Lifetime::default() };
    let standby = Standby { idle_after_ms: Some(sleeps_after), ..Standby::default() };
    (lifetime, standby)
}

/// The other way round.
pub(super) fn timeout_secs(spec: &SandboxSpec) -> u64 {
    let secs = match spec.name {
        Some(_) => spec.standby.idle_after_ms.div_ceil(1000),
        None => spec.lifetime.expire_idle_ms.unwrap_or(0).div_ceil(1000),
    };
    // Clients read a number with a sign.
    secs.min(i64::MAX as u64)
}

// === Network and ports ===

#[derive(Debug, Clone, Deserialize, Serialize)]
pub(super) struct NetworkPolicy {
    #[serde(default = "yes")]
    allow_internet_access: bool,
    #[serde(default)]
    allow_out: Vec<String>,
    #[serde(default)]
    deny_out: Vec<String>,
}

fn yes() -> bool {
    true
}

impl From<&Network> for NetworkPolicy {
    fn from(network: &Network) -> Self {
        let shown = |ranges: &[Destination]| ranges.iter().map(ToString::to_string).collect();
        Self {
            allow_internet_access: network.internet,
            allow_out: shown(&network.allow),
            deny_out: shown(&network.deny),
        }
    }
}

impl NetworkPolicy {
    pub(super) fn to_network(&self) -> Result<Network> {
        self.instead_of(&Network::default())
    }

    /// The same for a sandbox that has a policy: what clients of this dialect can't know of, such as
    /// routes, stays as it is.
    pub(super) fn instead_of(&self, before: &Network) -> Result<Network> {
        let list = |field: &str, entries: &[String]| {
            entries.iter().map(|entry| destination(field, entry)).collect::<Result<Vec<_>>>()
        };
        Ok(Network {
            internet: self.allow_internet_access,
            allow: list("allow_out", &self.allow_out)?,
            deny: list("deny_out", &self.deny_out)?,
            ..before.clone()
        })
    }
}

/// The policy without any restriction, for a sandbox that has one.
pub(super) fn unrestricted(before: &Network) -> Network {
    Network { internet: true, allow: Vec::new(), deny: Vec::new(), ..before.clone() }
}

/// An address, a range, a host, or all hosts below one. The port of an entry is not looked at: what is
/// reached is reached on all ports.
fn destination(field: &str, entry: &str) -> Result<Destination> {
    let refused = |why: &str| {
        let shown: String = entry.chars().take(80).collect();
        ApiError::invalid(format!("network.{field}: {shown:?}: {why}"))
    };
    let text = match entry.trim().rsplit_once(':') {
        Some((address, port)) if port.parse::<u16>().is_ok() => address,
        Some(_) | None => entry.trim(),
    };
    let parsed: Destination = text.parse().map_err(|error| refused(&format!("{error}")))?;
    if parsed.web().is_some_and(WebRule::needs_the_request) {
        return Err(refused("an entry is an address, a range or a host, without method and path"));
    }
    Ok(parsed)
}

/// How long the name servers may take to find all names of a policy.
const LOOKUP_DEADLINE: Duration = Duration::from_secs(3);
/// Names that are looked up at the same time; each takes a thread while it waits.
const LOOKUPS: usize = 16;

/// Clients expect that a running sandbox's policy is refused if a name in it can't be found. Whom the
/// host itself asks is asked; what is below `*.` is not looked up, because nobody can.
pub(super) async fn must_resolve(network: &Network) -> Result<()> {
    let mut hosts: Vec<String> = Vec::new();
    for rule in network.allow.iter().chain(&network.deny).filter_map(Destination::web) {
        hosts.extend(rule.host().exact().map(str::to_owned));
    }
    let all = stream::iter(hosts).map(Ok).try_for_each_concurrent(LOOKUPS, resolves);
    let late = |_| ApiError::invalid("network: its names do not resolve in time");
    tokio::time::timeout(LOOKUP_DEADLINE, all).await.map_err(late)?
}

async fn resolves(host: String) -> Result<()> {
    let found = tokio::net::lookup_host((host.as_str(), 0)).await;
    match found.ok().and_then(|mut addresses| addresses.next()) {
        Some(_) => Ok(()),
        None => Err(ApiError::invalid(format!("network: {host} does not resolve"))),
    }
}

/// Who may reach which ports, if it was `before` so.
pub(super) fn ports(
    before: &PortAccess,
    exposed: Option<Vec<u16>>,
    public: Option<bool>,
) -> Result<PortAccess> {
    let mut exposed = exposed.unwrap_or_else(|| before.exposed.clone());
    exposed.sort_unstable();
    exposed.dedup();
    if exposed.contains(&MANAGEMENT_PORT) {
        let text = format!("exposed_ports: {MANAGEMENT_PORT} is reserved for sandbox management");
        return Err(ApiError::invalid(text));
    }
    Ok(PortAccess { exposed, public: public.unwrap_or(before.public) })
}

/// For a field that may be left out, null, or there: three different meanings.
pub(super) fn present<'de, T, D>(
    deserializer: D,
) -> std::result::Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allow: &[&str]) -> NetworkPolicy {
        let allow_out = allow.iter().map(|text| (*text).to_owned()).collect();
        NetworkPolicy { allow_internet_access: true, allow_out, deny_out: Vec::new() }
    }

    #[test]
    fn ports_of_a_network_entry_are_not_looked_at() {
        let network = policy(&["1.1.1.1", "1.1.1.1:443", "10.0.0.7/8:80"]).to_network().unwrap();
        let shown: Vec<_> = network.allow.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["1.1.1.1", "1.1.1.1", "10.0.0.0/8"]);
    }

    #[test]
    fn hosts_are_entries_like_addresses() {
        let entries = ["Example.com", "example.com:443", "*.example.com", " api.example.com "];
        let network = policy(&entries).to_network().unwrap();
        let shown: Vec<_> = network.allow.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["example.com", "example.com", "*.example.com", "api.example.com"]);
    }

    #[test]
    fn what_is_no_destination_is_refused_with_its_field() {
        for entry in [
            "https://example.com",
            "https://example.com:443",
            "example.com/path",
            "example.com:443/path",
            "GET example.com",
            "not an address",
            "::1",
            "1.2.3.4/99",
            "",
            ":443",
        ] {
            let error = policy(&[entry]).to_network().unwrap_err();
            assert!(error.to_string().starts_with("network.allow_out: "), "{error}");
        }
    }

    #[test]
    fn what_this_dialect_does_not_know_of_a_policy_stays() {
        let before: Network =
            serde_json::from_str(r#"{"deny": ["a.example"], "gateway": "office"}"#).unwrap();
        let after = policy(&["b.example"]).instead_of(&before).unwrap();
        assert_eq!((after.allow.len(), after.deny.len()), (1, 0));
        assert_eq!(after.gateway, before.gateway);
        let cleared = unrestricted(&before);
        assert_eq!((cleared.deny.len(), &cleared.gateway), (0, &before.gateway));
    }

    #[test]
    fn an_idle_time_puts_a_named_sandbox_to_sleep_and_ends_an_unnamed_one() {
        let (lifetime, standby) = idle(true, 600);
        assert_eq!((lifetime.expire_idle_ms, standby.idle_after_ms), (None, Some(Some(600_000))));
        let (lifetime, standby) = idle(false, 600);
        assert_eq!((lifetime.expire_idle_ms, standby.idle_after_ms), (Some(600_000), Some(None)));
        for named in [true, false] {
            let (lifetime, standby) = idle(named, 0);
            assert_eq!((lifetime.expire_idle_ms, standby.idle_after_ms), (None, Some(None)));
        }
        assert_eq!(idle(true, u64::MAX).1.idle_after_ms, Some(Some(u64::MAX)));
    }

    #[test]
    fn ports_are_sorted_and_keep_what_is_not_said() {
        let before = PortAccess { exposed: vec![80], public: true };
        let after = ports(&before, Some(vec![9000, 80, 9000]), None).unwrap();
        assert_eq!(after, PortAccess { exposed: vec![80, 9000], public: true });
        let after = ports(&before, None, Some(false)).unwrap();
        assert_eq!(after, PortAccess { exposed: vec![80], public: false });
        assert!(ports(&before, Some(vec![MANAGEMENT_PORT]), None).is_err());
    }

    #[test]
    fn a_gpu_is_refused_in_every_spelling() {
        for (asked, refused) in [
            (r#"{"gpus": [{"count": 1, "model": "A10"}]}"#, true),
            (r#"{"gpu_configs": [{"count": 1}]}"#, true),
            (r#"{"gpus": 2}"#, true),
            (r#"{"gpus": []}"#, false),
            (r#"{"gpus": 0}"#, false),
            (r#"{"gpus": null}"#, false),
            ("{}", false),
        ] {
            let asked: ResourcesRequest = serde_json::from_str(asked).unwrap();
            assert_eq!(asked.to_resize().is_err(), refused, "{asked:?}");
        }
    }

    #[test]
    fn the_disk_has_an_older_name() {
        let disk = |text: &str| {
            let asked: ResourcesRequest = serde_json::from_str(text).unwrap();
            asked.to_resize().unwrap().disk_mib
        };
        assert_eq!(disk(r#"{"ephemeral_disk_mb": 2048}"#), Some(2048));
        assert_eq!(disk(r#"{"ephemeral_disk_mb": 0}"#), None);
        assert_eq!(disk(r#"{"disk_mb": 4096, "ephemeral_disk_mb": 2048}"#), Some(4096));
    }
}
