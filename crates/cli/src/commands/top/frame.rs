//! A picture of all sandboxes at one moment. Pure.

use std::cmp::Reverse;
use std::collections::HashMap;

use tokio::time::Instant;
use torpor_protocol::guest::TerminalSize;
use torpor_protocol::snapshot::SandboxUsage;
use torpor_protocol::{SandboxId, State, Tier};

use crate::commands::sandboxes;
use crate::output;
use crate::units;

/// Lines that are not sandboxes: the summary, an empty one, the header, and the one with the cursor.
const OTHER_LINES: usize = 4;

/// Turns readings of processor time into percent of a core.
#[derive(Debug, Default)]
pub(super) struct Meter {
    last: HashMap<SandboxId, (Instant, u64)>,
}

impl Meter {
    /// Percent of a core since the reading before; absent for what was not there then.
    pub(super) fn read(&mut self, usages: &[SandboxUsage], at: Instant) -> HashMap<SandboxId, f64> {
        let mut percents = HashMap::new();
        let mut readings = HashMap::with_capacity(usages.len());
        for usage in usages {
            if let Some((then, before)) = self.last.get(&usage.id)
                // Less than before: it has a new machine.
                && let Some(used) = usage.cpu_ms.checked_sub(*before)
            {
                let passed = at.saturating_duration_since(*then).as_secs_f64().max(0.001);
                percents.insert(usage.id.clone(), used as f64 / 10.0 / passed);
            }
            readings.insert(usage.id.clone(), (at, usage.cpu_ms));
        }
        self.last = readings;
        percents
    }
}

/// The picture; with a size it fits in.
pub(super) fn draw(
    mut usages: Vec<SandboxUsage>,
    percents: &HashMap<SandboxId, f64>,
    now_ms: u64,
    size: Option<TerminalSize>,
) -> String {
    // Busy ones on top; f64 has no order, hundredths have one.
    let busy = |usage: &SandboxUsage| percents.get(&usage.id).map_or(0, |p| (p * 100.0) as u64);
    usages.sort_by_key(|usage| {
        let use_ = (Reverse(usage.memory_bytes), Reverse(usage.last_used_at_ms));
        (rank(usage), Reverse(busy(usage)), use_, usage.id.clone())
    });
    let room = size.map_or(usize::MAX, |size| usize::from(size.rows).saturating_sub(OTHER_LINES));
    let hidden = usages.len().saturating_sub(room);
    let shown = if hidden > 0 { room.saturating_sub(1) } else { usages.len() };
    let rows = usages[..shown].iter().map(|usage| row(usage, percents, now_ms)).collect();
    let header = ["NAME", "STATE", "MEMORY", "CPU", "DISK", "SAVED", "LAST USE", "WAKES"];
    let mut text = format!("{}\n\n{}", summary(&usages), output::table(&header, rows));
    if hidden > 0 {
        text.push_str(&format!("… and {} more\n", usages.len() - shown));
    }
    match size {
        Some(size) => narrow(&text, usize::from(size.cols)),
        None => text,
    }
}

/// Those that use the most come first.
fn rank(usage: &SandboxUsage) -> u8 {
    match (usage.state, usage.tier) {
        (State::Creating | State::Running, _) => 0,
        (State::Asleep, Some(Tier::Warm) | None) => 1,
        (State::Asleep, Some(Tier::Cold)) => 2,
        (State::Failed, _) => 3,
        (State::Terminated, _) => 4,
    }
}

fn row(usage: &SandboxUsage, percents: &HashMap<SandboxId, f64>, now_ms: u64) -> Vec<String> {
    let name = usage.name.as_ref().map_or(usage.id.as_str(), |name| name.as_str());
    let limit = units::show_mib(usage.memory_limit_bytes / (1024 * 1024));
    let percent = percents.get(&usage.id).filter(|_| usage.state == State::Running);
    vec![
        name.to_owned(),
        sandboxes::show_state(usage.state, usage.tier),
        format!("{} / {limit}", units::show_bytes(usage.memory_bytes)),
        percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.0}%")),
        units::show_bytes(usage.disk_bytes),
        units::show_bytes(usage.saved_bytes),
        units::show_age(usage.last_used_at_ms, now_ms),
        usage.wakes.to_string(),
    ]
}

fn summary(usages: &[SandboxUsage]) -> String {
    let count = |wanted: u8| usages.iter().filter(|usage| rank(usage) == wanted).count();
    let sum = |of: fn(&SandboxUsage) -> u64| {
        units::show_bytes(usages.iter().map(of).fold(0, u64::saturating_add))
    };
    let failed = match count(3) {
        0 => String::new(),
        failed => format!(", {failed} failed"),
    };
    format!(
        "{} sandboxes: {} running, {} warm, {} cold{failed}; memory {}, saved {}",
        usages.len(),
        count(0),
        count(1),
        count(2),
        sum(|usage| usage.memory_bytes),
        sum(|usage| usage.saved_bytes),
    )
}

fn narrow(text: &str, cols: usize) -> String {
    text.lines().map(|line| format!("{}\n", output::cut(line, cols))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const MIB: u64 = 1024 * 1024;

    fn usage(name: &str, state: State, tier: Option<Tier>) -> SandboxUsage {
        SandboxUsage {
            id: SandboxId::random(),
            name: Some(name.parse().unwrap()),
            state,
            tier,
            memory_bytes: 10 * MIB,
            memory_limit_bytes: 1024 * MIB,
            cpu_ms: 0,
            disk_bytes: 2048,
            saved_bytes: 41 * MIB,
            last_used_at_ms: 58_000,
            wakes: 3,
        }
    }

    fn three() -> Vec<SandboxUsage> {
        vec![
            usage("cold", State::Asleep, Some(Tier::Cold)),
            usage("warm", State::Asleep, Some(Tier::Warm)),
            usage("busy", State::Running, None),
        ]
    }

    #[test]
    fn the_busy_are_above_those_that_sleep() {
        let text = draw(three(), &HashMap::new(), 60_000, None);
        let expected = "\
3 sandboxes: 1 running, 1 warm, 1 cold; memory 30.0 MiB, saved 123.0 MiB

NAME   STATE           MEMORY             CPU   DISK      SAVED      LAST USE   WAKES
busy   running         10.0 MiB / 1 GiB   -     2.0 KiB   41.0 MiB   2s         3
warm   asleep (warm)   10.0 MiB / 1 GiB   -     2.0 KiB   41.0 MiB   2s         3
cold   asleep (cold)   10.0 MiB / 1 GiB   -     2.0 KiB   41.0 MiB   2s         3
";
        assert_eq!(text, expected);
    }

    #[test]
    fn processor_time_becomes_percent_of_a_core() {
        let mut meter = Meter::default();
        let (start, mut list) = (Instant::now(), three());
        assert!(meter.read(&list, start).is_empty());
        list[2].cpu_ms = 1_500;
        let percents = meter.read(&list, start + Duration::from_secs(2));
        assert_eq!(percents[&list[2].id], 75.0);
        assert!(draw(list.clone(), &percents, 60_000, None).contains("  75%  "));
        list[2].cpu_ms = 0;
        let percents = meter.read(&list, start + Duration::from_secs(3));
        assert!(!percents.contains_key(&list[2].id), "a new machine begins at nothing");
    }

    #[test]
    fn a_small_terminal_gets_what_fits() {
        let many: Vec<_> =
            (0..50).map(|n| usage(&format!("s-{n}"), State::Running, None)).collect();
        for rows in [1, 4, 5, 6, 24] {
            let size = Some(TerminalSize { cols: 30, rows });
            let text = draw(many.clone(), &HashMap::new(), 60_000, size);
            let fits = text.lines().count() <= usize::from(rows).max(OTHER_LINES);
            assert!(fits && text.lines().all(|line| line.chars().count() <= 30), "{rows}:\n{text}");
            assert!(text.contains("… and "), "{text}");
        }
        let size = Some(TerminalSize { cols: 200, rows: 54 });
        let text = draw(many, &HashMap::new(), 60_000, size);
        assert_eq!(text.lines().count(), 53, "all fit:\n{text}");
    }
}
