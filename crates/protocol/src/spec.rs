//! What a user asks a sandbox to be.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::id::{ImageId, Name, SecretName};
use crate::network::Network;
use crate::time;
use crate::volume::Mount;

/// Environment variables, labels: sorted, so that the same request is the same bytes.
pub type Pairs = BTreeMap<String, String>;

/// Everything that decides what a sandbox is; written to the ledger before it lives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxSpec {
    /// A named sandbox outlives its creator; an unnamed one is ephemeral.
    pub name: Option<Name>,
    /// The image as it was asked for.
    pub image: String,
    /// The image it was at that time.
    pub image_id: ImageId,
    pub resources: Resources,
    /// The engine that isolates it (`gvisor`, `microvm`), decided when it was created; absent: it is older
    /// than the choice.
    #[serde(default)]
    pub engine: Option<String>,
    /// Given to every process in the sandbox.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// For the user to find it again; they mean nothing to Torpor.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub network: Network,
    #[serde(default, deserialize_with = "lifetime_of_any_age")]
    pub lifetime: Lifetime,
    #[serde(default)]
    pub standby: StandbyPolicy,
    /// Program and arguments that are started when it boots; empty: none. It is not started again
    /// when the sandbox wakes: it is still there.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// Secrets whose values every process gets as variables of these names. Values are never part of
    /// a specification.
    #[serde(default)]
    pub secrets: Vec<SecretName>,
    /// Who may reach its ports from outside; absent: all of them, with a key if there are keys.
    #[serde(default)]
    pub ports: Option<PortAccess>,
    /// The pool it was claimed from.
    #[serde(default)]
    pub pool: Option<Name>,
    /// Volumes and drives that it has, by slot; absent: it was made before there were any, and can't have one.
    #[serde(default)]
    pub mounts: Option<Vec<Mount>>,
}

impl SandboxSpec {
    /// Volumes and drives that it has.
    pub fn mounts(&self) -> &[Mount] {
        self.mounts.as_deref().unwrap_or_default()
    }
}

/// Upper bounds of what a sandbox may use of its host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Resources {
    /// Processor time, in cores; fractions are allowed.
    pub cpus: f64,
    /// Memory of all its processes and its kernel.
    pub memory_mib: u64,
    /// What it may write on top of its image.
    pub disk_mib: u64,
    /// Host tasks; a process inside needs about two.
    pub pids: u32,
}

impl Default for Resources {
    fn default() -> Self {
        Self { cpus: 1.0, memory_mib: 1024, disk_mib: 10_240, pids: Self::PIDS_MIN }
    }
}

impl Resources {
    /// gVisor loses the whole sandbox at this limit, so it is not meant to be met in daily use.
    pub const PIDS_MIN: u32 = 4096;
    /// Less does not hold the engine's own kernel.
    pub const MEMORY_MIN_MIB: u64 = 64;
    /// Less does not hold a filesystem.
    pub const DISK_MIN_MIB: u64 = 16;

    pub fn disk_bytes(&self) -> u64 {
        self.disk_mib.saturating_mul(1 << 20)
    }
}

/// Which ports of a sandbox are reached from outside, through previews.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PortAccess {
    pub exposed: Vec<u16>,
    /// Also without an API key.
    pub public: bool,
}

/// When a sandbox ends by itself. All absent: never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Lifetime {
    /// Terminate this long after it was created.
    pub max_age_ms: Option<u64>,
    /// Terminate when nobody talked to it for so long.
    pub expire_idle_ms: Option<u64>,
    /// Terminate at this time.
    #[serde(rename = "expires_at", with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at_ms: Option<u64>,
}

/// Ledgers and saves of older versions count in seconds.
fn lifetime_of_any_age<'de, D: Deserializer<'de>>(d: D) -> Result<Lifetime, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Millis(Lifetime),
        Seconds { max_age_secs: Option<u64>, expire_idle_secs: Option<u64>, expire_at: Option<u64> },
    }
    let ms = |secs: Option<u64>| secs.map(|secs| secs.saturating_mul(1000));
    Ok(match Written::deserialize(d)? {
        Written::Millis(lifetime) => lifetime,
        Written::Seconds { max_age_secs, expire_idle_secs, expire_at } => Lifetime {
            max_age_ms: ms(max_age_secs),
            expire_idle_ms: ms(expire_idle_secs),
            expires_at_ms: ms(expire_at),
        },
    })
}

/// When a sandbox falls asleep, and what happens around it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct StandbyPolicy {
    /// Falls asleep when nobody talked to it for so long; null: never by itself, which is 0 in memory.
    #[serde(with = "time::never")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub idle_after_ms: u64,
    /// Whether a request wakes it. Otherwise requests to a sleeping sandbox are refused until
    /// somebody wakes it.
    pub auto_wake: bool,
    pub hooks: Hooks,
}

impl Default for StandbyPolicy {
    fn default() -> Self {
        Self { idle_after_ms: 15_000, auto_wake: true, hooks: Hooks::default() }
    }
}

/// Commands in the sandbox around its sleep. Empty: none. What they return is logged and changes
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Hooks {
    /// Program and arguments, before it falls asleep.
    pub before_sleep: Vec<String>,
    /// Program and arguments, after it woke or was forked and before any request gets in.
    pub after_wake: Vec<String>,
    /// Longer than this nobody waits; the command is killed.
    pub grace_ms: u64,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { before_sleep: Vec::new(), after_wake: Vec::new(), grace_ms: 5_000 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(lifetime: &str, idle_after_ms: &str) -> SandboxSpec {
        let text = format!(
            r#"{{"name":null,"image":"x","image_id":"{}","resources":{{}},"lifetime":{lifetime},
                "standby":{{"idle_after_ms":{idle_after_ms},"auto_wake":true}}}}"#,
            "0".repeat(64)
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn specifications_of_older_versions_mean_what_they_meant() {
        let old = r#"{"max_age_secs":60,"expire_idle_secs":null,"expire_at":1800000000}"#;
        let old = spec(old, "0");
        let lifetime = Lifetime {
            max_age_ms: Some(60_000),
            expire_idle_ms: None,
            expires_at_ms: Some(1_800_000_000_000),
        };
        assert_eq!((old.lifetime, old.standby.idle_after_ms), (lifetime, 0));
        let written = serde_json::to_string(&old).unwrap();
        assert!(written.contains(r#""expires_at":"2027-01-15T08:00:00.000Z""#), "{written}");
        assert_eq!(serde_json::from_str::<SandboxSpec>(&written).unwrap(), old);
        assert_eq!(spec("{}", "null").standby.idle_after_ms, 0);
    }

    #[test]
    fn a_client_says_times_in_the_present_form_only() {
        for bad in [r#"{"max_age_secs":1}"#, r#"{"expires_at":"tomorrow"}"#] {
            assert!(serde_json::from_str::<Lifetime>(bad).is_err(), "{bad}");
        }
    }
}
