//! The log.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

use crate::config::{Log, LogFormat};

/// The MCP SDK tells of every request several times, and with `debug` what is in it, secrets too: whoever wants
/// that names it.
const QUIET: &str = "rmcp=error";

/// Starts writing the log to standard error. Once per process; again does nothing.
pub fn start(log: &Log) -> Result<(), ParseError> {
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter(&log.level)?).with_writer(std::io::stderr);
    // An error means that a log is being written already.
    let _ = match log.format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().with_current_span(true).with_span_list(false).try_init(),
    };
    Ok(())
}

fn filter(level: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::builder().parse(format!("{QUIET},{level}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mcp_sdk_is_quiet_unless_it_is_named() {
        let shown = |level: &str| filter(level).unwrap().to_string();
        for level in ["info", "debug", "info,torpor_engines=debug"] {
            assert!(shown(level).contains(QUIET), "{}", shown(level));
        }
        assert!(shown("info,rmcp=debug").contains("rmcp=debug"));
        assert!(!shown("info,rmcp=debug").contains(QUIET));
        assert!(filter("torpor=nonsense").is_err());
    }
}
