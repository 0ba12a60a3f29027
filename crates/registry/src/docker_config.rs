//! What `docker login` left: `~/.docker/config.json`, and the helpers that it names.
//!
//! A helper is a program `docker-credential-NAME` of this host; it hears a host on its standard input and
//! answers with a login. It runs as the daemon does, with a deadline and a bound on what it says.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;

use crate::reference::HUB;
use crate::{Error, Login, Result};

/// Largest file that is read.
const FILE_MAX: u64 = 1024 * 1024;
/// Most that a helper may say.
const SAID_MAX: u64 = 64 * 1024;
/// How long a helper may think: some ask a server in a cloud.
const HELPER_DEADLINE: Duration = Duration::from_secs(15);
/// What the file calls the hub.
const HUB_KEYS: [&str; 3] = ["https://index.docker.io/v1/", "index.docker.io", HUB];
/// What a helper gives as the name of somebody who has a token instead of a password.
const TOKEN_NAME: &str = "<token>";

/// The file, read anew each time: people log in while the daemon runs.
#[derive(Debug, Clone)]
pub struct DockerConfig {
    path: PathBuf,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct File {
    auths: BTreeMap<String, Auth>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Auth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Helped {
    username: String,
    secret: String,
}

impl DockerConfig {
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// The login of a registry, if there is one.
    pub async fn find(&self, registry: &str) -> Result<Option<Login>> {
        let failed = |why: String| Error::Credentials { registry: registry.to_owned(), why };
        let Some(file) = self.read().await.map_err(failed)? else { return Ok(None) };
        let keys = keys(registry);
        let helper = keys.iter().find_map(|key| file.cred_helpers.get(key));
        if let Some(helper) = helper.or(file.creds_store.as_ref()) {
            for key in &keys {
                if let Some(login) = ask(helper, key).await.map_err(failed)? {
                    return Ok(Some(login));
                }
            }
        }
        let auth = keys.iter().find_map(|key| file.auths.get(key));
        Ok(auth.and_then(login))
    }

    async fn read(&self) -> Result<Option<File>, String> {
        let shown = self.path.display();
        let file = match tokio::fs::File::open(&self.path).await {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{shown}: {error}")),
        };
        let mut bytes = Vec::new();
        let read = file.take(FILE_MAX).read_to_end(&mut bytes).await;
        read.map_err(|error| format!("{shown}: {error}"))?;
        // What stands at the place of an error may be a password.
        let parsed = serde_json::from_slice(&bytes);
        parsed
            .map(Some)
            .map_err(|error| format!("{shown}, line {}: no JSON of Docker's", error.line()))
    }
}

fn keys(registry: &str) -> Vec<String> {
    if registry == HUB {
        return HUB_KEYS.map(str::to_owned).to_vec();
    }
    let urls = ["https://", "http://"].map(|scheme| format!("{scheme}{registry}"));
    [vec![registry.to_owned()], urls.to_vec()].concat()
}

fn login(auth: &Auth) -> Option<Login> {
    if let Some(token) = auth.identitytoken.as_ref().filter(|token| !token.is_empty()) {
        return Some(Login::Refresh(token.clone()));
    }
    if let (Some(username), Some(password)) = (&auth.username, &auth.password) {
        return Some(Login::Password { username: username.clone(), password: password.clone() });
    }
    let decoded = STANDARD.decode(auth.auth.as_ref()?.trim()).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    let (username, password) = text.split_once(':')?;
    let password = password.trim_end_matches('\0').to_owned();
    Some(Login::Password { username: username.to_owned(), password })
}

async fn ask(helper: &str, host: &str) -> Result<Option<Login>, String> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    if helper.is_empty() || !helper.bytes().all(fine) {
        return Err(format!("{helper:.80?} is no name of a helper"));
    }
    let program = format!("docker-credential-{helper}");
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("{program} can't be run: {error}"))?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let talk = async {
        if let Some(mut input) = input {
            // One that knows without asking may not listen.
            let _ = input.write_all(format!("{host}\n").as_bytes()).await;
        }
        let mut said = Vec::new();
        if let Some(output) = output {
            output.take(SAID_MAX).read_to_end(&mut said).await?;
        }
        Ok::<_, std::io::Error>((said, child.wait().await?))
    };
    let talked = timeout(HELPER_DEADLINE, talk).await;
    let talked = talked.map_err(|_| format!("{program} does not answer"))?;
    let (said, status) = talked.map_err(|error| format!("{program}: {error}"))?;
    if !status.success() {
        // It knows of none; some helpers say so in words only.
        return Ok(None);
    }
    let helped: Helped =
        serde_json::from_slice(&said).map_err(|_| format!("{program} answers no login"))?;
    Ok(Some(match helped.username.as_str() {
        TOKEN_NAME => Login::Refresh(helped.secret),
        _ => Login::Password { username: helped.username, password: helped.secret },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(username: &str, password: &str) -> Option<Login> {
        Some(Login::Password { username: username.to_owned(), password: password.to_owned() })
    }

    async fn found(text: &str, registry: &str) -> Result<Option<Login>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        DockerConfig::new(path).find(registry).await
    }

    #[tokio::test]
    async fn logins_of_docker_are_found() {
        let text = format!(
            r#"{{"auths":{{"https://index.docker.io/v1/":{{"auth":"{}"}},
                "ghcr.io":{{"username":"u","password":"p"}},
                "https://quay.io":{{"identitytoken":"t"}},"x.io":{{}}}},"credsStore":null}}"#,
            STANDARD.encode("me:se:cret")
        );
        assert_eq!(found(&text, "docker.io").await.unwrap(), password("me", "se:cret"));
        assert_eq!(found(&text, "ghcr.io").await.unwrap(), password("u", "p"));
        assert_eq!(found(&text, "quay.io").await.unwrap(), Some(Login::Refresh("t".to_owned())));
        assert_eq!(found(&text, "x.io").await.unwrap(), None);
        assert_eq!(found(&text, "other.io").await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_broken_file_is_said_to_be_and_not_shown() {
        let error = found(r#"{"auths":{"a":{"auth": hunter2}}}"#, "a").await.unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "{error}");
        let missing = DockerConfig::new("/nowhere/config.json".into());
        assert_eq!(missing.find("a").await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_helper_of_a_strange_name_is_not_run() {
        for helper in ["../../bin/sh", "a b", "a;b", ""] {
            let text = format!(r#"{{"credHelpers":{{"a.io":"{helper}"}}}}"#);
            assert!(found(&text, "a.io").await.is_err(), "{helper}");
        }
    }
}
