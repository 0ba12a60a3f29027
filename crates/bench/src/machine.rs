//! What the figures were measured on.

use serde::Serialize;
use torpor_protocol::api::Info;

/// How a version of the microVM engine tells that it emulates.
const EMULATED: &str = ", tcg,";

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    pub(crate) torpor: String,
    pub(crate) engine: String,
    /// Guests have no processor but one that a program imitates: figures say nothing about speed.
    pub(crate) emulated: bool,
    pub(crate) kernel: String,
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) memory_gib: u64,
    /// Load average before the benchmark: others' work.
    pub(crate) load: String,
}

/// Load average of the last 1, 5 and 15 minutes.
pub(crate) fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

pub(crate) fn describe(info: &Info) -> Machine {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(':').nth(1)).unwrap_or("").trim().to_owned()
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let kib: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
    Machine {
        torpor: info.version.clone(),
        engine: format!("{} {}", info.engine, info.engine_version),
        emulated: info.engine_version.contains(EMULATED),
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        processor: field(&read("/proc/cpuinfo"), "model name"),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_gib: kib.div_ceil(1024 * 1024),
        load: load(),
    }
}
