//! What bounds a group: set when it is made, and changed while it is in use.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use torpor_protocol::Resources;

use super::group::{Group, no_controller, wait_until};

/// The kernel's usual accounting period: shorter costs switches, longer makes a machine stutter.
const CPU_PERIOD_MICROS: u64 = 100_000;
/// The kernel refuses a smaller quota.
const CPU_QUOTA_MIN_MICROS: u64 = 1_000;
/// What a group has beyond a smaller limit is mostly files, which a busy disk takes so long to write.
const SHED_DEADLINE: Duration = Duration::from_secs(5);

/// How much a group may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: u64,
    /// Processor time in a period of a tenth of a second.
    pub cpu_micros: u64,
    /// Tasks.
    pub pids: u64,
}

impl Limits {
    pub fn of(resources: &Resources) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a small positive number, and `as` saturates"
        )]
        let quota = (resources.cpus * CPU_PERIOD_MICROS as f64) as u64;
        Self {
            memory_bytes: resources.memory_mib.saturating_mul(1 << 20),
            cpu_micros: quota.max(CPU_QUOTA_MIN_MICROS),
            pids: resources.pids.into(),
        }
    }
}

impl Group {
    /// As the kernel has them.
    pub fn limits(&self) -> io::Result<Limits> {
        let read = |file: PathBuf| {
            let text = fs::read_to_string(file)?;
            let first = text.split_whitespace().next().unwrap_or_default();
            first.parse().map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
        };
        Ok(Limits {
            memory_bytes: read(self.memory_limit()?)?,
            cpu_micros: read(self.need("cpu", "cpu.cfs_quota_us", "cpu.max")?)?,
            pids: read(self.need("pids", "pids.max", "pids.max")?)?,
        })
    }

    /// Changes the limits of a group that may be in use, frozen or not. On `Err` some of them may be
    /// changed. Less memory than the group can do with is refused, at the latest after some seconds.
    pub fn bound(&self, limits: &Limits) -> io::Result<()> {
        self.bound_memory(limits.memory_bytes)?;
        self.bound_cpu(limits.cpu_micros)?;
        let pids = self.need("pids", "pids.max", "pids.max")?;
        fs::write(pids, limits.pids.to_string())
    }

    /// Memory that can't be had back by dropping files: in use, or in the host's swap.
    pub fn memory_held(&self) -> u64 {
        let swap = match self.pick("memory", "memory.memsw.usage_in_bytes", "memory.swap.current") {
            Some(file) if file.ends_with("memory.swap.current") => number(&file),
            // Both together.
            Some(file) => number(&file).saturating_sub(self.memory_charged()),
            None => 0,
        };
        self.memory_bytes().saturating_add(swap)
    }

    /// How many tasks it has now.
    pub fn tasks(&self) -> u64 {
        self.pick("pids", "pids.current", "pids.current").map_or(0, |file| number(&file))
    }

    fn bound_memory(&self, bytes: u64) -> io::Result<()> {
        let limit = self.memory_limit()?;
        // v1 bounds memory and swap together: the limit is a limit, and an idle machine can still
        // be paged out. v2 bounds swap apart; a machine must fit there as a whole to be paged out.
        let swap = self.pick("memory", "memory.memsw.limit_in_bytes", "memory.swap.max");
        // Only where the kernel accounts swap.
        let swap = swap.filter(|file| file.exists());
        let text = bytes.to_string();
        // v1 never lets the limit of memory alone be above that of both; none at all is no number.
        let before = fs::read_to_string(&limit).ok().and_then(|text| text.trim().parse().ok());
        if before.is_some_and(|before: u64| bytes > before) {
            swap.map_or(Ok(()), |file| fs::write(file, &text))?;
            return fs::write(limit, &text);
        }
        self.shed(bytes, || fs::write(limit, &text))?;
        swap.map_or(Ok(()), |file| fs::write(file, &text))
    }

    /// Does `then` when the group uses no more than `bytes`. v1 sees to that by itself; v2 would kill
    /// for what it can't have back at once.
    fn shed(&self, bytes: u64, then: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let high = self.need("memory", "memory.limit_in_bytes", "memory.high")?;
        if !high.ends_with("memory.high") || self.memory_charged() <= bytes {
            return then();
        }
        let done = wait_until(SHED_DEADLINE, "it needs more memory than that", || {
            // Every time it is written the kernel takes back what it can.
            fs::write(&high, bytes.to_string())?;
            Ok(self.memory_charged() <= bytes)
        });
        let done = done.and_then(|()| then());
        fs::write(high, "max")?;
        done
    }

    /// Lets it have every processor, for work that is the host's and not its own.
    pub fn lend_processors(&self) -> io::Result<()> {
        let count = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        self.bound_cpu(count * CPU_PERIOD_MICROS)
    }

    /// Takes them back.
    pub fn bound_processors(&self, resources: &Resources) -> io::Result<()> {
        self.bound_cpu(Limits::of(resources).cpu_micros)
    }

    fn bound_cpu(&self, quota: u64) -> io::Result<()> {
        let file = self.need("cpu", "cpu.cfs_quota_us", "cpu.max")?;
        if file.ends_with("cpu.max") {
            return fs::write(file, format!("{quota} {CPU_PERIOD_MICROS}"));
        }
        fs::write(file.with_file_name("cpu.cfs_period_us"), CPU_PERIOD_MICROS.to_string())?;
        fs::write(file, quota.to_string())
    }

    /// With the files that the host could drop at once.
    pub(super) fn memory_charged(&self) -> u64 {
        let used = self.pick("memory", "memory.usage_in_bytes", "memory.current");
        used.map_or(0, |file| number(&file))
    }

    pub(super) fn memory_limit(&self) -> io::Result<PathBuf> {
        self.need("memory", "memory.limit_in_bytes", "memory.max")
    }

    pub(super) fn need(&self, controller: &str, v1: &str, v2: &str) -> io::Result<PathBuf> {
        self.pick(controller, v1, v2).ok_or_else(|| no_controller(controller))
    }
}

/// What stands in a file; nothing is 0.
pub(super) fn number(file: &Path) -> u64 {
    fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
