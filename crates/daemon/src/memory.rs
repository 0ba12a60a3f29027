//! What this host says about its memory; the fleet acts on it.

use torpor_lifecycle::MemoryReading;

pub(crate) fn read() -> MemoryReading {
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    MemoryReading {
        // A kernel that does not say is not known to be short of memory.
        available_mib: available_mib(&text("/proc/meminfo")).unwrap_or(u64::MAX),
        stalled_percent: stalled_percent(&text("/proc/pressure/memory")).unwrap_or(0.0),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_of_the_kernel_are_understood() {
        let meminfo = "MemTotal:       16384000 kB\nMemFree: 1 kB\nMemAvailable:    2048000 kB\n";
        assert_eq!(available_mib(meminfo), Some(2000));
        let pressure = "some avg10=12.34 avg60=1.00 avg300=0.00 total=1\nfull avg10=99.00 x";
        assert_eq!(stalled_percent(pressure), Some(12.34));
        assert_eq!((available_mib(""), stalled_percent("")), (None, None));
        assert!(read().available_mib > 0);
    }
}
