//! Arguments of `run`: how a background process is kept alive, and how one finds out whether it is well.

use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use torpor_protocol::guest::{HealthCheck, RestartPolicy, Supervision};

use crate::units;
use crate::units::millis;

/// What is asked of a server that does not say.
const DEFAULT_PATH: &str = "/";

#[derive(Debug, Clone, Default, Args)]
pub(super) struct SuperviseArgs {
    /// A name for the process, unique in the sandbox.
    #[arg(long, requires = "detach")]
    name: Option<String>,
    /// When to start it again after it ended [with a health check: on-failure].
    #[arg(long, requires = "detach", value_name = "WHEN")]
    restart: Option<Restart>,
    /// Start it again so many times at most [default: any number].
    #[arg(long, requires = "restart", value_name = "N")]
    max_restarts: Option<u32>,
    /// Wait so long before it is started again, longer each time [default: 500ms].
    #[arg(long, requires = "restart", value_name = "DURATION", value_parser = units::parse_duration)]
    backoff: Option<Duration>,
    /// Never wait longer than this before it is started again [default: 30s].
    #[arg(long, requires = "restart", value_name = "DURATION", value_parser = units::parse_duration)]
    max_backoff: Option<Duration>,
    /// It is well while this port inside answers HTTP with a status below 400; else it is killed.
    #[arg(
        long, requires = "detach", group = "health",
        value_name = "PORT[:/PATH]", value_parser = parse_place
    )]
    health_http: Option<(u16, String)>,
    /// It is well while this port inside takes connections; else it is killed.
    #[arg(
        long, requires = "detach", group = "health",
        value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..)
    )]
    health_tcp: Option<u16>,
    /// Look for the first time so long after its start [default: 5s].
    #[arg(long, requires = "health", value_name = "DURATION", value_parser = units::parse_duration)]
    health_delay: Option<Duration>,
    /// Look so often [default: 1s].
    #[arg(long, requires = "health", value_name = "DURATION", value_parser = units::parse_duration)]
    health_interval: Option<Duration>,
    /// Wait no longer than this for its answer [default: 500ms].
    #[arg(long, requires = "health", value_name = "DURATION", value_parser = units::parse_duration)]
    health_timeout: Option<Duration>,
    /// So many looks in a row must fail before it counts as unwell [default: 3].
    #[arg(long, requires = "health", value_name = "N")]
    health_failures: Option<u32>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Restart {
    Never,
    OnFailure,
    Always,
}

impl From<Restart> for RestartPolicy {
    fn from(restart: Restart) -> Self {
        match restart {
            Restart::Never => Self::Never,
            Restart::OnFailure => Self::OnFailure,
            Restart::Always => Self::Always,
        }
    }
}

impl SuperviseArgs {
    /// None: it is on its own.
    pub(super) fn supervise(self) -> Option<Supervision> {
        let health = self.health();
        if self.name.is_none() && self.restart.is_none() && health.is_none() {
            return None;
        }
        // Who wants to know whether it is well wants it to be.
        let unsaid = if health.is_some() { RestartPolicy::OnFailure } else { RestartPolicy::Never };
        let usual = Supervision::default();
        Some(Supervision {
            name: self.name,
            restart: self.restart.map_or(unsaid, RestartPolicy::from),
            max_restarts: self.max_restarts,
            initial_backoff_ms: self.backoff.map_or(usual.initial_backoff_ms, millis),
            max_backoff_ms: self.max_backoff.map_or(usual.max_backoff_ms, millis),
            health,
        })
    }

    fn health(&self) -> Option<HealthCheck> {
        let (port, path) = match (&self.health_http, self.health_tcp) {
            (Some((port, path)), _) => (*port, Some(path)),
            (None, Some(port)) => (port, None),
            (None, None) => return None,
        };
        // What is not said is the API's to say.
        let usual = serde_json::from_value(json!({ "port": port, "path": path }));
        let usual: HealthCheck = usual.expect("a port and a path are a check");
        Some(HealthCheck {
            initial_delay_ms: self.health_delay.map_or(usual.initial_delay_ms, millis),
            interval_ms: self.health_interval.map_or(usual.interval_ms, millis),
            timeout_ms: self.health_timeout.map_or(usual.timeout_ms, millis),
            failure_threshold: self.health_failures.unwrap_or(usual.failure_threshold),
            ..usual
        })
    }
}

/// `8080` or `8080:/healthz`.
fn parse_place(text: &str) -> Result<(u16, String), String> {
    let (port, path) = text.split_once(':').unwrap_or((text, DEFAULT_PATH));
    match port.parse() {
        Ok(port @ 1..) if path.starts_with('/') => Ok((port, path.to_owned())),
        Ok(_) | Err(_) => Err("it is a port, or port and path such as 8080:/healthz".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_port_and_maybe_a_path() {
        assert_eq!(parse_place("80"), Ok((80, "/".to_owned())));
        assert_eq!(parse_place("8080:/a:b"), Ok((8080, "/a:b".to_owned())));
        for text in ["", "0", "70000", "80:", "80:healthz", "/healthz", ":/x", "http://x"] {
            assert!(parse_place(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn a_name_alone_starts_nothing_again_and_a_health_check_does() {
        assert_eq!(SuperviseArgs::default().supervise(), None);
        let named = SuperviseArgs { name: Some("app".into()), ..SuperviseArgs::default() };
        assert_eq!(named.supervise().unwrap().restart, RestartPolicy::Never);
        let args = SuperviseArgs { health_tcp: Some(80), ..SuperviseArgs::default() };
        let supervise = args.supervise().unwrap();
        assert_eq!(supervise.restart, RestartPolicy::OnFailure);
        let health = supervise.health.unwrap();
        assert_eq!((health.port, health.path, health.failure_threshold), (80, None, 3));
    }
}
