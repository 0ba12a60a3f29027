//! From what a client wants to run to what the agent is told. A field that is known and means nothing
//! where it was sent is refused rather than ignored.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use torpor_protocol::guest::{FailureCode, HealthCheck, ProcessSpec, RestartPolicy, Supervision};
use torpor_service::error::GuestError;

use super::{Refused, Result};

/// The user of Tensorlake's own images. Some versions of its library ask for him by default, also in
/// images that do not have him: there it is the image's own user.
const DEFAULT_USER: &str = "tl-user";

/// A process, as `processes/run` and `processes` are told of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Command {
    command: String,
    args: Option<Vec<String>>,
    env: Option<BTreeMap<String, String>>,
    working_dir: Option<String>,
    /// Seconds.
    timeout: Option<f64>,
    /// The same, as some clients write it.
    timeout_secs: Option<f64>,
    user: Option<User>,
    stdin_mode: Option<StdinMode>,
    stdout_mode: Option<OutputMode>,
    stderr_mode: Option<OutputMode>,
    name: Option<String>,
    restart: Option<Restart>,
    health_check: Option<Check>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum User {
    Text(String),
    Account(Account),
}

#[derive(Debug, Deserialize)]
struct Account {
    name: Option<String>,
    uid: Option<u32>,
    gid: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StdinMode {
    Closed,
    Pipe,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OutputMode {
    Capture,
    Discard,
}

/// When a managed process is started again.
#[derive(Debug, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Restart {
    policy: Policy,
    max_restarts: Option<u32>,
    initial_backoff_ms: u64,
    max_backoff_ms: u64,
}

impl Default for Restart {
    /// As the libraries document it.
    fn default() -> Self {
        let policy = Policy::OnFailure;
        Self { policy, max_restarts: None, initial_backoff_ms: 500, max_backoff_ms: 30_000 }
    }
}

#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Policy {
    Never,
    #[serde(alias = "on-failure")]
    OnFailure,
    Always,
}

/// How a managed process is looked at; the defaults are those of the libraries, and of our agent.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Check {
    #[serde(rename = "type")]
    kind: CheckKind,
    port: u16,
    #[serde(default)]
    path: Option<String>,
    #[serde(default = "Check::initial_delay_ms")]
    initial_delay_ms: u64,
    #[serde(default = "Check::interval_ms")]
    interval_ms: u64,
    #[serde(default = "Check::timeout_ms")]
    timeout_ms: u64,
    #[serde(default = "Check::failure_threshold")]
    failure_threshold: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum CheckKind {
    Http,
    Tcp,
}

impl Check {
    fn initial_delay_ms() -> u64 {
        5_000
    }

    fn interval_ms() -> u64 {
        1_000
    }

    fn timeout_ms() -> u64 {
        500
    }

    fn failure_threshold() -> u32 {
        3
    }
}

impl Command {
    /// Attached until it ends: its standard input is closed, all of its output is told.
    pub(super) fn attached(self) -> Result<ProcessSpec> {
        let discards = [self.stdout_mode, self.stderr_mode].contains(&Some(OutputMode::Discard));
        for (field, given) in [
            ("stdin_mode", self.stdin_mode == Some(StdinMode::Pipe)),
            ("stdout_mode, stderr_mode", discards),
            ("name", self.name.is_some()),
            ("restart", self.restart.is_some()),
            ("health_check", self.health_check.is_some()),
        ] {
            if given {
                return Err(Refused::invalid(format!("{field}: is for POST /api/v1/processes")));
            }
        }
        self.common()
    }

    /// On its own; managed if it has a name, or is to be kept alive.
    pub(super) fn background(mut self) -> Result<ProcessSpec> {
        let supervise = self.supervision()?;
        let (stdin, stdout, stderr) = (self.stdin_mode, self.stdout_mode, self.stderr_mode);
        Ok(ProcessSpec {
            stdin: stdin == Some(StdinMode::Pipe),
            discard_stdout: stdout == Some(OutputMode::Discard),
            discard_stderr: stderr == Some(OutputMode::Discard),
            survives_detach: true,
            supervise,
            ..self.common()?
        })
    }

    fn common(self) -> Result<ProcessSpec> {
        let mut spec = program(self.command, self.args, self.env, self.working_dir)?;
        spec.user = self.user.map(User::text).transpose()?;
        spec.timeout_ms = self.timeout.or(self.timeout_secs).map(milliseconds).transpose()?;
        Ok(spec)
    }

    fn supervision(&mut self) -> Result<Option<Supervision>> {
        let (name, restart, check) =
            (self.name.take(), self.restart.take(), self.health_check.take());
        if name.is_none() && restart.is_none() && check.is_none() {
            return Ok(None);
        }
        if let Some(name) = &name {
            check_name(name)?;
        }
        let restart = restart.unwrap_or_default();
        Ok(Some(Supervision {
            name,
            restart: restart.policy.into(),
            max_restarts: restart.max_restarts,
            initial_backoff_ms: restart.initial_backoff_ms,
            max_backoff_ms: restart.max_backoff_ms,
            health: check.map(HealthCheck::try_from).transpose()?,
        }))
    }
}

/// What all ways to start something have in common.
pub(super) fn program(
    command: String,
    args: Option<Vec<String>>,
    env: Option<BTreeMap<String, String>>,
    working_dir: Option<String>,
) -> Result<ProcessSpec> {
    if command.is_empty() {
        return Err(Refused::invalid("command: is missing or empty"));
    }
    let mut words = vec![command];
    words.extend(args.unwrap_or_default());
    let env = env.unwrap_or_default();
    Ok(ProcessSpec { command: words, env, cwd: working_dir, ..ProcessSpec::default() })
}

fn milliseconds(seconds: f64) -> Result<u64> {
    let wrong = |_| Refused::invalid("timeout: is a number of seconds, and not negative");
    let time = Duration::try_from_secs_f64(seconds).map_err(wrong)?;
    Ok(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// A name must not look like a process id, and must fit into a path.
fn check_name(name: &str) -> Result<()> {
    let wrong = match name {
        "" => "is empty",
        "." | ".." => "can't stand in a path",
        name if name.contains('/') => "contains a '/'",
        name if name.bytes().all(|byte| byte.is_ascii_digit()) => "is a number",
        _ => return Ok(()),
    };
    Err(Refused::invalid(format!("name: {name:?} {wrong}")))
}

impl User {
    /// As the agent takes it: name, uid, name:group or uid:gid.
    fn text(self) -> Result<String> {
        let Account { name, uid, gid } = match self {
            Self::Text(text) => return Ok(text),
            Self::Account(account) => account,
        };
        let user = match (name, uid) {
            (Some(name), None) => name,
            (None, Some(uid)) => uid.to_string(),
            (Some(_), Some(_)) | (None, None) => {
                return Err(Refused::invalid("user: needs either a name or a uid"));
            }
        };
        Ok(match gid {
            Some(gid) => format!("{user}:{gid}"),
            None => user,
        })
    }
}

impl From<Policy> for RestartPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Never => Self::Never,
            Policy::OnFailure => Self::OnFailure,
            Policy::Always => Self::Always,
        }
    }
}

impl TryFrom<Check> for HealthCheck {
    type Error = Refused;
    fn try_from(check: Check) -> Result<Self> {
        let path = match (check.kind, check.path) {
            (CheckKind::Http, path) => Some(path.unwrap_or_else(|| "/".to_owned())),
            (CheckKind::Tcp, None) => None,
            (CheckKind::Tcp, Some(_)) => {
                return Err(Refused::invalid("health_check.path: is for type http"));
            }
        };
        if check.port == 0 {
            return Err(Refused::invalid("health_check.port: 0 is no port"));
        }
        Ok(Self {
            port: check.port,
            path,
            initial_delay_ms: check.initial_delay_ms,
            interval_ms: check.interval_ms,
            timeout_ms: check.timeout_ms,
            failure_threshold: check.failure_threshold,
        })
    }
}

impl From<&Supervision> for Restart {
    fn from(supervision: &Supervision) -> Self {
        let policy = match supervision.restart {
            RestartPolicy::Never => Policy::Never,
            RestartPolicy::OnFailure => Policy::OnFailure,
            RestartPolicy::Always => Policy::Always,
        };
        Self {
            policy,
            max_restarts: supervision.max_restarts,
            initial_backoff_ms: supervision.initial_backoff_ms,
            max_backoff_ms: supervision.max_backoff_ms,
        }
    }
}

impl From<&HealthCheck> for Check {
    fn from(check: &HealthCheck) -> Self {
        Self {
            kind: if check.path.is_some() { CheckKind::Http } else { CheckKind::Tcp },
            port: check.port,
            path: check.path.clone(),
            initial_delay_ms: check.initial_delay_ms,
            interval_ms: check.interval_ms,
            timeout_ms: check.timeout_ms,
            failure_threshold: check.failure_threshold,
        }
    }
}

/// What to start instead, if it could not be started because the default user is not there.
pub(super) fn without_default_user(spec: &ProcessSpec, error: &GuestError) -> Option<ProcessSpec> {
    let missing = matches!(error, GuestError::Refused { code: FailureCode::NoSuchUser, .. });
    let default = spec.user.as_deref() == Some(DEFAULT_USER);
    (missing && default).then(|| ProcessSpec { user: None, ..spec.clone() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(value: Value) -> Command {
        serde_json::from_value(value).unwrap()
    }

    fn attached(value: Value) -> Option<ProcessSpec> {
        parse(value).attached().ok()
    }

    fn background(value: Value) -> Option<ProcessSpec> {
        parse(value).background().ok()
    }

    #[test]
    fn a_timeout_is_in_seconds_under_either_name() {
        let timeout = |value| attached(value).map(|spec| spec.timeout_ms);
        assert_eq!(timeout(json!({"command": "a", "timeout": 0.5})), Some(Some(500)));
        assert_eq!(timeout(json!({"command": "a", "timeout_secs": 2})), Some(Some(2000)));
        assert_eq!(timeout(json!({"command": "a", "timeout": null})), Some(None));
        assert_eq!(timeout(json!({"command": "a", "timeout": -1})), None);
        assert!(milliseconds(f64::NAN).is_err() && milliseconds(f64::INFINITY).is_err());
    }

    #[test]
    fn a_user_is_a_text_or_an_account() {
        let user = |user: Value| attached(json!({"command": "a", "user": user}))?.user;
        assert_eq!(user(json!("1000:1000")).as_deref(), Some("1000:1000"));
        assert_eq!(user(json!({"name": "bob"})).as_deref(), Some("bob"));
        assert_eq!(user(json!({"uid": 7, "gid": 8})).as_deref(), Some("7:8"));
        assert_eq!(user(json!({"uid": 7})).as_deref(), Some("7"));
        assert_eq!(user(json!({"gid": 8})), None);
        assert_eq!(user(json!({"uid": 7, "name": "bob"})), None);
    }

    #[test]
    fn what_is_named_or_kept_alive_is_managed() {
        let managed = |value| background(value).unwrap().supervise;
        assert_eq!(managed(json!({"command": "a"})), None);
        let named = managed(json!({"command": "a", "name": "web 1"})).unwrap();
        assert_eq!(named.name.as_deref(), Some("web 1"));
        assert_eq!((named.initial_backoff_ms, named.max_backoff_ms), (500, 30_000));
        let restart = json!({"policy": "on-failure", "max_restarts": 3});
        let kept = managed(json!({"command": "a", "restart": restart})).unwrap();
        assert_eq!((kept.restart, kept.max_restarts), (RestartPolicy::OnFailure, Some(3)));
        let check = json!({"type": "http", "port": 80});
        let looked = managed(json!({"command": "a", "health_check": check})).unwrap();
        let check = looked.health.unwrap();
        assert_eq!((check.port, check.path.as_deref(), check.interval_ms), (80, Some("/"), 1000));
    }

    #[test]
    fn a_name_that_no_path_can_name_is_refused() {
        for bad in ["", "12", "a/b", ".", ".."] {
            assert!(background(json!({"command": "a", "name": bad})).is_none(), "{bad}");
        }
        for good in ["web 1", "1a", "ä", "a.b"] {
            assert!(background(json!({"command": "a", "name": good})).is_some(), "{good}");
        }
    }

    #[test]
    fn what_means_nothing_for_a_run_is_refused() {
        for field in [
            json!({"stdin_mode": "pipe"}),
            json!({"stderr_mode": "discard"}),
            json!({"name": "web"}),
            json!({"restart": {}}),
            json!({"health_check": {"type": "tcp", "port": 1}}),
        ] {
            let mut value = field.clone();
            value["command"] = "a".into();
            assert!(attached(value).is_none(), "{field}");
        }
        let plain = json!({"command": "a", "stdin_mode": "closed", "stdout_mode": "capture"});
        assert!(attached(plain).is_some());
    }

    #[test]
    fn only_the_default_user_may_be_missing() {
        let spec = |user: &str| ProcessSpec { user: Some(user.into()), ..ProcessSpec::default() };
        let refused = |code| GuestError::Refused { code, message: "x".into() };
        let error = refused(FailureCode::NoSuchUser);
        let instead = without_default_user(&spec("tl-user"), &error).unwrap();
        assert_eq!(instead.user, None);
        assert!(without_default_user(&spec("eve"), &error).is_none());
        let other = refused(FailureCode::CannotStart);
        assert!(without_default_user(&spec("tl-user"), &other).is_none());
    }
}
