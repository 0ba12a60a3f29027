//! Configuration: defaults, then the file, then the environment, then the command line.
//!
//! - This is the only reader of the environment.
//! - [`KEYS`] lists every key; the name of its environment variable follows from it, and the
//!   reference in `docs/guide/configuration.md` is generated from it.
//! - A key that is not known is refused by its name.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use figment::Figment;
use figment::providers::{Format, Serialized, Toml};
use figment::value::Value;
use serde::{Deserialize, Serialize};
use torpor_edge::tls::TlsConfig;
use torpor_engines::Users;
use torpor_protocol::Resources;
use torpor_service::Settings;
use torpor_service::domains::Own;
use torpor_service::keys::KeySettings;
use torpor_service::pulls::RegistrySettings;
use torpor_store::Vault;

mod egress;
mod guest;
mod images;
mod keys;
mod mcp_gateway;
mod never;
mod previews;
mod second;

pub use egress::EgressConfig;
pub use guest::{GuestConfig, ImageGuestConfig, Variables};
pub use images::ImagesConfig;
pub use keys::{KEYS, Key};
pub use mcp_gateway::McpGatewayConfig;
pub use previews::PreviewsConfig;
pub use second::ListenAlso;
use second::USUAL;

/// Read if it is there and no other file is named.
pub const DEFAULT_FILE: &str = "/etc/torpor/torpor.toml";

/// More machines that do nothing are a mistake: each takes memory, and two per core are enough.
const SHELLS_MAX: usize = 64;

/// Everything `torpor serve` can be told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub listen: SocketAddr,
    /// A second address with the same answers; absent: those where clients of a dialect look.
    pub listen_also: Option<ListenAlso>,
    pub data_dir: PathBuf,
    pub runtime_dir: PathBuf,
    pub api_key: Option<Secret>,
    /// Whether a key is needed; absent: from the first key on.
    pub require_key: Option<bool>,
    /// What secrets are encrypted with; without it, a file in the data directory.
    pub secret_key: Option<Secret>,
    pub engine: EngineConfig,
    pub defaults: Resources,
    pub limits: Limits,
    pub standby: StandbyConfig,
    pub builds: BuildsConfig,
    pub egress: EgressConfig,
    pub mcp_gateway: McpGatewayConfig,
    pub guest: GuestConfig,
    pub images: ImagesConfig,
    /// By host.
    pub registries: BTreeMap<String, RegistrySettings>,
    pub previews: PreviewsConfig,
    pub tls: TlsConfig,
    pub log: Log,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    pub kind: EngineKind,
    pub runsc_path: Option<PathBuf>,
    pub qemu_path: Option<PathBuf>,
    /// Whether the other engines that work here are opened too.
    pub others: bool,
    /// Whether microVMs may do without KVM.
    pub emulate: bool,
    /// Machines have this user of the host and those after it.
    pub first_user: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kind: EngineKind::default(),
            others: true,
            runsc_path: None,
            qemu_path: None,
            emulate: false,
            first_user: Users::FIRST,
        }
    }
}

impl EngineConfig {
    /// Who machines are on this host; it was looked at when the configuration was read.
    pub fn users(&self) -> Users {
        Users::starting_at(self.first_user).unwrap_or_default()
    }

    /// Whether machines may be emulated where KVM does not work.
    pub fn may_emulate(&self) -> bool {
        self.kind == EngineKind::Microvm && self.emulate
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// The best one that works on this host.
    #[default]
    Auto,
    Gvisor,
    Microvm,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub sandboxes: usize,
    pub connections: usize,
    /// Of jobs, at the same time; 0: some for each core.
    pub tasks: usize,
    /// Of what all tasks left, together.
    pub results_mib: u64,
    /// Of each key; 0: any number.
    pub requests_per_sec: u32,
}

/// When sandboxes sleep, and how deeply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StandbyConfig {
    #[serde(with = "never")]
    pub idle_after_ms: u64,
    pub persist_after_ms: u64,
    pub warm_for_secs: u64,
    pub memory_floor_mib: u64,
    pub pressure_percent: u32,
    pub shells: usize,
    pub idle_awake_max: usize,
}

/// What is kept of image builds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildsConfig {
    pub cache_mib: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    pub format: LogFormat,
    pub level: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    Text,
    Json,
}

/// A text that is not shown when its owner is printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: USUAL,
            listen_also: None,
            data_dir: "/var/lib/torpor".into(),
            runtime_dir: "/run/torpor".into(),
            api_key: None,
            require_key: None,
            secret_key: None,
            engine: EngineConfig::default(),
            defaults: Resources::default(),
            limits: Limits {
                sandboxes: 10_000,
                connections: 10_000,
                tasks: 0,
                results_mib: 10 * 1024,
                requests_per_sec: 0,
            },
            standby: StandbyConfig::default(),
            builds: BuildsConfig { cache_mib: 20 * 1024 },
            egress: EgressConfig::default(),
            mcp_gateway: McpGatewayConfig::default(),
            guest: GuestConfig::default(),
            images: ImagesConfig::default(),
            registries: BTreeMap::new(),
            previews: PreviewsConfig::default(),
            tls: TlsConfig::default(),
            log: Log { format: LogFormat::Text, level: "info".to_owned() },
        }
    }
}

impl Default for StandbyConfig {
    fn default() -> Self {
        Self {
            idle_after_ms: 15_000,
            persist_after_ms: 30_000,
            warm_for_secs: 3600,
            memory_floor_mib: 0,
            pressure_percent: 20,
            shells: 2,
            idle_awake_max: 0,
        }
    }
}

/// What the command line says; it has the last word.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    pub listen: Option<SocketAddr>,
    pub data_dir: Option<PathBuf>,
    pub runtime_dir: Option<PathBuf>,
    pub engine: Option<EngineKind>,
    pub runsc_path: Option<PathBuf>,
    pub log_level: Option<String>,
    pub log_format: Option<LogFormat>,
}

/// Variables that mean something to other parts of Torpor.
const OTHER_VARIABLES: &[&str] =
    &["TORPOR_SERVER", "TORPOR_CA_FILE", "TORPOR_CONFIG", "TORPOR_AGENT", FAULT];

/// Where a test wants the daemon to die: a place of [`torpor_lifecycle::fault::POINTS`]. Means nothing
/// to a release build.
const FAULT: &str = "TORPOR_FAULT";

/// Arms the place that a test names.
pub(crate) fn arm_fault() {
    #[cfg(debug_assertions)]
    if let Ok(place) = std::env::var(FAULT) {
        torpor_lifecycle::fault::arm(&place);
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("the configuration file {0} does not exist")]
    NoSuchFile(PathBuf),
    #[error("the configuration is not valid: {0}")]
    Invalid(Box<figment::Error>),
    #[error("the configuration is not valid: {0}")]
    Senseless(String),
}

impl Config {
    /// Reads the file (`None`: [`DEFAULT_FILE`] if it exists) and the environment.
    pub fn load(file: Option<&Path>, overrides: Overrides) -> Result<Self, ConfigError> {
        Self::assemble(file, |name| std::env::var(name).ok(), overrides)
    }

    /// Variables of the environment that look like ours and mean nothing, for a warning.
    pub fn unknown_variables() -> Vec<String> {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        unknown_among(names)
    }

    /// Variables whose values are nobody else's business, for whoever starts programs.
    pub fn secret_variables() -> impl Iterator<Item = String> {
        KEYS.iter().filter(|key| key.is_secret()).map(Key::variable)
    }

    fn assemble(
        file: Option<&Path>,
        variable: impl Fn(&str) -> Option<String>,
        overrides: Overrides,
    ) -> Result<Self, ConfigError> {
        if let Some(missing) = file.filter(|path| !path.exists()) {
            return Err(ConfigError::NoSuchFile(missing.to_owned()));
        }
        let file = file.unwrap_or(Path::new(DEFAULT_FILE));
        let mut figment = Figment::from(Serialized::defaults(Self::default()));
        if file.exists() {
            figment = figment.merge(Toml::file_exact(file));
        }
        for key in KEYS {
            if let Some(text) = variable(&key.variable()) {
                let value = if key.is_secret() { Value::from(text) } else { parse(&text) };
                figment = figment.merge(Serialized::default(key.name, value));
            }
        }
        let mut config: Self =
            figment.extract().map_err(|error| ConfigError::Invalid(Box::new(error)))?;
        overrides.apply(&mut config);
        config.check()?;
        Ok(config)
    }

    /// What the service needs to know of it.
    pub(crate) fn service(&self) -> Settings {
        Settings {
            defaults: self.defaults,
            idle_after_ms: self.standby.idle_after_ms,
            build_cache_bytes: self.builds.cache_mib.saturating_mul(1 << 20),
        }
    }

    pub(crate) fn keys(&self, exposed: bool) -> KeySettings<'_> {
        KeySettings {
            fixed: self.api_key.as_ref().map(|key| key.0.as_str()),
            required: self.require_key,
            exposed,
            requests_per_sec: self.limits.requests_per_sec,
        }
    }

    /// Names that no domain of others may stand for.
    pub(crate) fn own_names(&self) -> Own {
        Own {
            previews: self.previews.domain.to_ascii_lowercase(),
            names: self.tls.names.iter().map(ToString::to_string).collect(),
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        let senseless = |text: &str| Err(ConfigError::Senseless(text.to_owned()));
        if self.api_key.as_ref().is_some_and(|key| key.0.len() < 16) {
            return senseless("api_key is shorter than 16 characters, so it can be guessed");
        }
        if let Some(Err(error)) = self.secret_key.as_ref().map(|key| Vault::check_key(&key.0)) {
            return senseless(&format!("secret_key: {error}"));
        }
        if !self.data_dir.is_absolute() || !self.runtime_dir.is_absolute() {
            return senseless("data_dir and runtime_dir must be absolute paths");
        }
        if Users::starting_at(self.engine.first_user).is_none() {
            return senseless("engine.first_user must be a number from 65536 to 2147418112");
        }
        if self.limits.connections == 0 {
            return senseless("limits.connections is 0, so nobody could connect");
        }
        if self.standby.shells > SHELLS_MAX {
            return senseless(&format!("standby.shells is larger than {SHELLS_MAX}"));
        }
        if self.standby.pressure_percent > 100 {
            return senseless("standby.pressure_percent is a percentage, from 0 to 100");
        }
        self.egress.check()?;
        self.previews.check()?;
        self.tls.check().map_err(|text| ConfigError::Senseless(text.to_owned()))?;
        torpor_service::admission::check_resources(&self.defaults)
            .map_err(|error| ConfigError::Senseless(format!("defaults: {error}")))
    }
}

impl Overrides {
    fn apply(self, config: &mut Config) {
        let Self { listen, data_dir, runtime_dir, engine, runsc_path, log_level, log_format } =
            self;
        set(&mut config.listen, listen);
        set(&mut config.data_dir, data_dir);
        set(&mut config.runtime_dir, runtime_dir);
        set(&mut config.engine.kind, engine);
        set(&mut config.log.level, log_level);
        set(&mut config.log.format, log_format);
        config.engine.runsc_path = runsc_path.or(config.engine.runsc_path.take());
    }
}

fn set<T>(slot: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *slot = value;
    }
}

/// A number if it looks like one, else a text.
fn parse(text: &str) -> Value {
    text.parse().expect("whatever is no other value is a text")
}

fn unknown_among(names: impl Iterator<Item = String>) -> Vec<String> {
    let known: Vec<_> = KEYS.iter().map(Key::variable).collect();
    let mut unknown: Vec<_> = names
        .filter(|name| name.starts_with("TORPOR_"))
        .filter(|name| !known.contains(name) && !OTHER_VARIABLES.contains(&name.as_str()))
        .collect();
    unknown.sort();
    unknown
}

/// Where programs are.
pub(crate) fn search_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).filter(|dir| dir.is_absolute()).collect()
}

/// The reference for people, as Markdown.
pub fn reference() -> String {
    let mut text = String::from(
        "# Configuration\n\n\
         `torpor serve` reads, each overriding the one before: its defaults, the file\n\
         `/etc/torpor/torpor.toml` (or the one named with `--config`), environment variables, and\n\
         its command line. A key that is not known is refused. In the file, `engine.kind` is `kind`\n\
         in the table `[engine]`.\n\n\
         | key | environment variable | default | meaning |\n|---|---|---|---|\n",
    );
    for key in KEYS {
        let line = format!(
            "| `{}` | `{}` | `{}` | {} |\n",
            key.name,
            key.variable(),
            key.default,
            key.help
        );
        text.push_str(&line);
    }
    text
}

#[cfg(test)]
mod tests;
