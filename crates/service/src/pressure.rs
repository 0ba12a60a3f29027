//! Memory pressure: a look once a second, and sleeping sandboxes leave memory, the least used first,
//! until there is relief.
//!
//! Free memory falls before anything waits, so a floor comes first; on hosts whose memory is mostly
//! file cache, processes may wait for it long before that, which the kernel's stall times tell.

use std::sync::Arc;
use std::time::Duration;

use crate::Service;
use crate::Settings;
use crate::admission::Host;
use crate::room;

/// Memory does not run out faster than sandboxes can be saved; a look costs two small reads.
const EVERY: Duration = Duration::from_secs(1);
/// The part of the host's memory that is kept free unless the configuration says otherwise.
const FLOOR_PART: u64 = 10;

/// What the host says about its memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    pub available_mib: u64,
    /// How much of the last ten seconds some process waited for memory; 0 if the kernel is silent.
    pub stalled_percent: f64,
}

/// Where readings come from; tests bring their own.
pub type Gauge = Arc<dyn Fn() -> Reading + Send + Sync>;

/// Why a sleeping sandbox has to leave memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Free memory is below the floor.
    Memory,
    /// Processes wait for memory.
    Stalls,
    /// Another sandbox needs its place.
    Room,
}

impl Cause {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Stalls => "stalls",
            Self::Room => "room",
        }
    }
}

/// This host.
pub fn gauge() -> Gauge {
    Arc::new(|| {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Reading {
            // A kernel that does not say is not known to be short of memory.
            available_mib: available_mib(&read("/proc/meminfo")).unwrap_or(u64::MAX),
            stalled_percent: stalled_percent(&read("/proc/pressure/memory")).unwrap_or(0.0),
        }
    })
}

fn available_mib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024)
}

fn stalled_percent(pressure: &str) -> Option<f64> {
    let line = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

/// What is too little, and too much.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Limits {
    floor_mib: u64,
    /// None: not looked at.
    stalled_percent: Option<f64>,
}

impl Limits {
    fn new(settings: &Settings, host: Host) -> Self {
        let floor_mib = match settings.memory_floor_mib {
            0 => host.memory_mib / FLOOR_PART,
            floor => floor,
        };
        let stalled_percent =
            (settings.pressure_percent > 0).then(|| f64::from(settings.pressure_percent));
        Self { floor_mib, stalled_percent }
    }

    fn exceeded(&self, reading: &Reading) -> Option<Cause> {
        if reading.available_mib < self.floor_mib {
            return Some(Cause::Memory);
        }
        let stalled = self.stalled_percent.is_some_and(|most| reading.stalled_percent > most);
        stalled.then_some(Cause::Stalls)
    }
}

/// Who can let go of memory.
trait Sleepers {
    /// Whether one did.
    fn demote(&self, cause: Cause) -> impl Future<Output = bool> + Send;
}

impl Sleepers for Service {
    async fn demote(&self, cause: Cause) -> bool {
        room::demote(self, cause).await
    }
}

/// Watches until it is dropped.
pub async fn watch(app: Arc<Service>) {
    let limits = Limits::new(&app.settings, app.host);
    let mut looks = tokio::time::interval(EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        relieve(limits, &app.gauge, &*app).await;
    }
}

/// One sandbox after another, until there is relief or nobody left.
async fn relieve(limits: Limits, gauge: &Gauge, sleepers: &impl Sleepers) {
    while let Some(cause) = limits.exceeded(&gauge()) {
        if !sleepers.demote(cause).await {
            return;
        }
        match cause {
            Cause::Memory | Cause::Room => {}
            // The average of ten seconds needs a moment to show what has changed.
            Cause::Stalls => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    const LIMITS: Limits = Limits { floor_mib: 1000, stalled_percent: Some(20.0) };

    /// A host on which each sandbox holds 100 MiB.
    struct FakeHost {
        sleeping: Mutex<u64>,
        causes: Mutex<Vec<Cause>>,
    }

    impl FakeHost {
        fn new(sleeping: u64) -> Arc<Self> {
            Arc::new(Self { sleeping: Mutex::new(sleeping), causes: Mutex::default() })
        }

        fn gauge(self: &Arc<Self>, free_mib: u64, stalled_percent: f64) -> Gauge {
            let host = Arc::clone(self);
            Arc::new(move || {
                let freed = host.causes.lock().len() as u64 * 100;
                Reading { available_mib: free_mib + freed, stalled_percent }
            })
        }
    }

    impl Sleepers for Arc<FakeHost> {
        async fn demote(&self, cause: Cause) -> bool {
            let mut sleeping = self.sleeping.lock();
            if *sleeping == 0 {
                return false;
            }
            *sleeping -= 1;
            self.causes.lock().push(cause);
            true
        }
    }

    #[tokio::test]
    async fn sandboxes_leave_memory_until_the_floor_is_reached_again() {
        let host = FakeHost::new(10);
        relieve(LIMITS, &host.gauge(750, 0.0), &host).await;
        assert_eq!(*host.causes.lock(), [Cause::Memory; 3]);
    }

    #[tokio::test]
    async fn a_host_without_sleepers_is_left_alone() {
        let host = FakeHost::new(2);
        relieve(LIMITS, &host.gauge(0, 0.0), &host).await;
        assert_eq!(host.causes.lock().len(), 2);
    }

    #[tokio::test]
    async fn stalls_take_one_sandbox_a_look() {
        let host = FakeHost::new(10);
        relieve(LIMITS, &host.gauge(5000, 20.1), &host).await;
        assert_eq!(*host.causes.lock(), [Cause::Stalls]);
    }

    #[tokio::test]
    async fn a_host_with_enough_memory_keeps_everybody() {
        let host = FakeHost::new(10);
        relieve(LIMITS, &host.gauge(1000, 20.0), &host).await;
        assert!(host.causes.lock().is_empty());
    }

    #[test]
    fn the_floor_is_a_tenth_of_the_host_unless_configured() {
        let host = Host { memory_mib: 8000 };
        let limits = |floor, percent| {
            let settings = Settings {
                defaults: torpor_protocol::Resources::default(),
                idle_after_ms: 1,
                sandboxes_max: 1,
                memory_floor_mib: floor,
                pressure_percent: percent,
            };
            Limits::new(&settings, host)
        };
        assert_eq!(limits(0, 20), Limits { floor_mib: 800, stalled_percent: Some(20.0) });
        assert_eq!(limits(5, 0), Limits { floor_mib: 5, stalled_percent: None });
    }

    #[test]
    fn readings_of_the_kernel_are_understood() {
        let meminfo = "MemTotal:       16384000 kB\nMemFree: 1 kB\nMemAvailable:    2048000 kB\n";
        assert_eq!(available_mib(meminfo), Some(2000));
        let pressure = "some avg10=12.34 avg60=1.00 avg300=0.00 total=1\nfull avg10=99.00 x";
        assert_eq!(stalled_percent(pressure), Some(12.34));
        assert_eq!((available_mib(""), stalled_percent("")), (None, None));
        assert!(gauge()().available_mib > 0);
    }
}
