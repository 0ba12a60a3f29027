//! Whether a sandbox's kernel was told to pause, read from what its threads are doing: it has no
//! other way of telling.
//!
//! A task of the guest is a goroutine with `(*Task).run` at its root. A paused kernel has every one
//! of them in `(*Task).doStop`; one that runs has at least the agent elsewhere, which nothing inside
//! can stop. While it waits for the last task to come to a halt it is in `(*Kernel).Pause`.

/// What a kernel is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    Running,
    Paused,
    /// It stands still for a save, which says nothing about afterwards.
    Saving,
}

/// `None`: this is no list of a kernel's threads.
pub(super) fn seen(stacks: &str) -> Option<Seen> {
    let mut tasks = 0;
    let (mut all_stopped, mut pausing) = (true, false);
    for stack in stacks.split("\n\n") {
        if stack.contains("(*containerManager).Checkpoint") {
            return Some(Seen::Saving);
        }
        pausing |= stack.contains("kernel.(*Kernel).Pause(");
        if stack.contains("kernel.(*Task).run(") {
            tasks += 1;
            all_stopped &= stack.contains("kernel.(*Task).doStop(");
        }
    }
    match tasks {
        0 => None,
        _ if all_stopped || pausing => Some(Seen::Paused),
        _ => Some(Seen::Running),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: &str = "goroutine 7 [select]:\npkg/sentry/kernel.(*Task).block(0x1)\n\
                        pkg/sentry/kernel.(*Task).run(0x1, 0x1)\n\ta.go:1";
    const STANDS: &str = "goroutine 8 [sync.Cond.Wait]:\npkg/sentry/kernel.(*Task).doStop(0x1)\n\
                          pkg/sentry/kernel.(*Task).run(0x1, 0x1)\n\ta.go:1";
    const TICKER: &str = "goroutine 9 [sleep]:\npkg/sentry/kernel.(*Kernel).runCPUClockTicker()";
    const PAUSING: &str = "goroutine 9 [wait]:\npkg/sentry/kernel.(*Kernel).Pause(0x1)";
    const SAVING: &str = "goroutine 9 [io]:\nboot.(*containerManager).Checkpoint(0x1)";

    #[test]
    fn a_kernel_is_paused_when_every_task_stands_or_is_about_to() {
        let seen = |stacks: &[&str]| seen(&stacks.join("\n\n"));
        assert_eq!(seen(&[TICKER, RUNS, RUNS]), Some(Seen::Running));
        assert_eq!(seen(&[TICKER, STANDS, RUNS]), Some(Seen::Running), "a stopped job is no pause");
        assert_eq!(seen(&[TICKER, STANDS, STANDS]), Some(Seen::Paused));
        assert_eq!(seen(&[TICKER, STANDS, RUNS, PAUSING]), Some(Seen::Paused));
        assert_eq!(seen(&[TICKER, STANDS, STANDS, SAVING]), Some(Seen::Saving));
        assert_eq!(seen(&[TICKER]), None);
        assert_eq!(seen(&[""]), None);
    }
}
