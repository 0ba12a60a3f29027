//! What an image says about the processes that run in it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Defaults for processes that say nothing else. Part of the image's id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    pub env: Vec<(String, String)>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub labels: BTreeMap<String, String>,
    /// Ports that its maker thinks of, like `8080/tcp`; they decide nothing here. Images of before do not
    /// have them in their id.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exposed: Vec<String>,
}

/// The configuration file of an OCI or Docker image, as far as it matters here.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OciConfig {
    pub(crate) os: Option<String>,
    pub(crate) architecture: Option<String>,
    config: Option<OciProcess>,
    pub(crate) rootfs: OciRootfs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct OciProcess {
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    labels: Option<BTreeMap<String, String>>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OciRootfs {
    /// Digests of the uncompressed layers, lowest first.
    pub(crate) diff_ids: Vec<String>,
}

impl From<OciConfig> for ImageConfig {
    fn from(oci: OciConfig) -> Self {
        let process = oci.config.unwrap_or_default();
        let env = process.env.unwrap_or_default();
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        Self {
            env: env.iter().filter_map(|pair| pair.split_once('=')).map(owned).collect(),
            user: filled(process.user),
            workdir: filled(process.working_dir),
            entrypoint: process.entrypoint.unwrap_or_default(),
            cmd: process.cmd.unwrap_or_default(),
            labels: process.labels.unwrap_or_default(),
            exposed: process.exposed_ports.unwrap_or_default().into_keys().collect(),
        }
    }
}

impl ImageConfig {
    /// The configuration file of an OCI image of one layer. The same image gives the same bytes, so it
    /// has no time of its own.
    pub(crate) fn to_oci(&self, architecture: &str, diff_id: &str) -> Vec<u8> {
        let env: Vec<_> = self.env.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let exposed: BTreeMap<_, _> =
            self.exposed.iter().map(|port| (port, serde_json::json!({}))).collect();
        let mut process = serde_json::Map::new();
        let mut set = |key: &str, value: serde_json::Value| {
            let empty = match &value {
                serde_json::Value::Null => true,
                serde_json::Value::Array(list) => list.is_empty(),
                serde_json::Value::Object(map) => map.is_empty(),
                serde_json::Value::Bool(_)
                | serde_json::Value::Number(_)
                | serde_json::Value::String(_) => false,
            };
            if !empty {
                process.insert(key.to_owned(), value);
            }
        };
        set("Env", env.into());
        set("User", serde_json::json!(self.user));
        set("WorkingDir", serde_json::json!(self.workdir));
        set("Entrypoint", serde_json::json!(self.entrypoint));
        set("Cmd", serde_json::json!(self.cmd));
        set("Labels", serde_json::json!(self.labels));
        set("ExposedPorts", serde_json::json!(exposed));
        let whole = serde_json::json!({
            "architecture": architecture,
            "config": process,
            "created": "1970-01-01T00:00:00Z",
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "torpor image push"}],
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        });
        whole.to_string().into_bytes()
    }
}

fn owned((key, value): (&str, &str)) -> (String, String) {
    (key.to_owned(), value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_oci_image_says_is_taken_over() {
        let text = r#"{"architecture":"amd64","os":"linux","config":{
            "Env":["PATH=/bin","EMPTY=","ODD"],"User":"1000:1000","WorkingDir":"/app",
            "Entrypoint":["/e"],"Cmd":["a","b"],"Labels":{"k":"v"},"ExposedPorts":{"80/tcp":{}}},
            "rootfs":{"type":"layers","diff_ids":["sha256:00"]}}"#;
        let oci: OciConfig = serde_json::from_str(text).unwrap();
        let config = ImageConfig::from(oci);
        let env = [("PATH", "/bin"), ("EMPTY", "")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(config.env, env);
        assert_eq!(config.user.as_deref(), Some("1000:1000"));
        assert_eq!(config.workdir.as_deref(), Some("/app"));
        assert_eq!(config.entrypoint, ["/e"]);
        assert_eq!(config.cmd, ["a", "b"]);
        assert_eq!(config.labels["k"], "v");
        assert_eq!(config.exposed, ["80/tcp"]);
        let again = config.to_oci("amd64", "sha256:00");
        let again: OciConfig = serde_json::from_slice(&again).unwrap();
        assert_eq!(ImageConfig::from(again), config, "what is pushed is what was pulled");
    }

    #[test]
    fn nulls_and_absences_are_nothing() {
        let text = r#"{"config":{"Env":null,"Cmd":null,"User":"","Labels":null}}"#;
        let oci: OciConfig = serde_json::from_str(text).unwrap();
        assert_eq!(ImageConfig::from(oci), ImageConfig::default());
    }
}
