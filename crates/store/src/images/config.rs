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
        }
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
            "Entrypoint":["/e"],"Cmd":["a","b"],"Labels":{"k":"v"}},
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
    }

    #[test]
    fn nulls_and_absences_are_nothing() {
        let text = r#"{"config":{"Env":null,"Cmd":null,"User":"","Labels":null}}"#;
        let oci: OciConfig = serde_json::from_str(text).unwrap();
        assert_eq!(ImageConfig::from(oci), ImageConfig::default());
    }
}
