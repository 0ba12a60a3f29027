//! The log.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

use crate::config::{Log, LogFormat};

/// Starts writing the log to standard error. Once per process; again does nothing.
pub fn start(log: &Log) -> Result<(), ParseError> {
    let filter = EnvFilter::builder().parse(&log.level)?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // An error means that a log is being written already.
    let _ = match log.format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().with_current_span(true).with_span_list(false).try_init(),
    };
    Ok(())
}
