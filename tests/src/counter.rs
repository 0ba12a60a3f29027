//! A process whose memory tells whether it is the same one as before.

use crate::{World, wait_for};

/// Counts in memory only, and tells the count in a file that it replaces as a whole. Another process
/// would have another seed.
const SCRIPT: &str = "
import os, time
seed = int.from_bytes(os.urandom(4), 'big')
n = 0
while True:
    n += 1
    with open('/tmp/count.new', 'w') as file: file.write(f'{seed} {n}')
    os.replace('/tmp/count.new', '/tmp/count')
    time.sleep(0.02)
";

/// What a counter said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// Of the process: another one has another.
    pub seed: u64,
    pub n: u64,
}

impl World {
    /// Starts a counter in a sandbox; returns when it counts.
    #[track_caller]
    pub fn start_counter(&self, sandbox: &str) -> Count {
        self.start_process(sandbox, &["python3", "-c", SCRIPT]);
        wait_for("the counter to begin", || self.try_count(sandbox))
    }

    /// What it says now.
    #[track_caller]
    pub fn count(&self, sandbox: &str) -> Count {
        let said = self.sh(sandbox, "cat /tmp/count");
        parse(&said.stdout).unwrap_or_else(|| panic!("no count: {said:?}"))
    }

    /// Waits until it counted on from `before`: the same process, with the same memory.
    #[track_caller]
    pub fn counts_on(&self, sandbox: &str, before: Count) -> Count {
        wait_for(&format!("the counter of {sandbox} to go on from {before:?}"), || {
            let now = self.count(sandbox);
            assert_eq!(now.seed, before.seed, "another process counts");
            assert!(now.n >= before.n, "it went back: {before:?} {now:?}");
            (now.n > before.n).then_some(now)
        })
    }

    fn try_count(&self, sandbox: &str) -> Option<Count> {
        parse(&self.sh(sandbox, "cat /tmp/count").stdout)
    }
}

fn parse(text: &str) -> Option<Count> {
    let (seed, n) = text.trim().split_once(' ')?;
    Some(Count { seed: seed.parse().ok()?, n: n.parse().ok()? })
}
