//! Arguments that several verbs share: what a sandbox may use, when it ends and how it sleeps.

use std::time::Duration;

use clap::Args;
use torpor_protocol::api::{Resize, Standby};
use torpor_protocol::{Hooks, Lifetime, StandbyPolicy};

use crate::units;

/// What a sandbox may use of its host.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct ResourceArgs {
    /// Processor cores; fractions are allowed [new sandboxes: 1].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub cpus: Option<f64>,
    /// Memory, such as 512m or 2g [new sandboxes: 1g].
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mib)]
    pub memory: Option<u64>,
    /// Disk it may write on top of its image, such as 20g [new sandboxes: 10g].
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mib)]
    pub disk: Option<u64>,
}

impl ResourceArgs {
    /// None: nothing is to be changed.
    pub(super) fn resize(self) -> Option<Resize> {
        let Self { cpus, memory: memory_mib, disk: disk_mib } = self;
        let resize = Resize { cpus, memory_mib, disk_mib };
        (resize != Resize::default()).then_some(resize)
    }
}

/// When a sandbox ends by itself.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(super) struct LifetimeArgs {
    /// Remove it so long after its creation, such as 30d.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    max_age: Option<Duration>,
    /// Remove it when nobody used it for so long, such as 7d.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    expire_idle: Option<Duration>,
    /// Remove it at this time: 2027-01-31 (UTC) or 2027-01-31T12:00:00+01:00.
    #[arg(long, value_name = "DATE", value_parser = units::parse_time)]
    expire_at: Option<u64>,
}

impl LifetimeArgs {
    /// What is given here, instead of what is in `lifetime`.
    pub(super) fn over(self, lifetime: Lifetime) -> Lifetime {
        Lifetime {
            max_age_ms: self.max_age.map(units::millis).or(lifetime.max_age_ms),
            expire_idle_ms: self.expire_idle.map(units::millis).or(lifetime.expire_idle_ms),
            expires_at_ms: self.expire_at.or(lifetime.expires_at_ms),
        }
    }

    pub(super) fn are_given(self) -> bool {
        self.max_age.is_some() || self.expire_idle.is_some() || self.expire_at.is_some()
    }
}

/// How a sandbox sleeps.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct StandbyArgs {
    /// Let it sleep when nobody used it for so long, or `never` [new sandboxes: 15s].
    #[arg(long, value_name = "DURATION", value_parser = parse_idle)]
    idle_after: Option<Idle>,
    /// Requests do not wake it; only `torpor wake` does.
    #[arg(long)]
    no_auto_wake: bool,
    /// Shell command in it before it falls asleep; empty is none.
    #[arg(long, value_name = "COMMAND")]
    before_sleep: Option<String>,
    /// Shell command in it after it woke or was forked, before any request gets in; empty is none.
    #[arg(long, value_name = "COMMAND")]
    after_wake: Option<String>,
    /// Wait no longer than this for one of these commands [new sandboxes: 5s].
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    hook_grace: Option<Duration>,
}

impl StandbyArgs {
    /// For a sandbox that is to be.
    pub(super) fn standby(self) -> Standby {
        self.instead_of(&StandbyPolicy::default())
    }

    /// For a sandbox that sleeps like this so far.
    pub(super) fn instead_of(self, policy: &StandbyPolicy) -> Standby {
        let hooks = policy.hooks.clone();
        let auto_wake = self.no_auto_wake.then_some(false);
        Standby {
            idle_after_ms: self.idle_after.map(|Idle(ms)| ms),
            auto_wake,
            hooks: self.hooks(hooks),
        }
    }

    pub(super) fn are_given(&self) -> bool {
        self.idle_after.is_some() || self.no_auto_wake || self.mentions_hooks()
    }

    fn mentions_hooks(&self) -> bool {
        self.before_sleep.is_some() || self.after_wake.is_some() || self.hook_grace.is_some()
    }

    /// All hooks go in one piece, so what is not mentioned comes from those that were.
    fn hooks(self, were: Hooks) -> Option<Hooks> {
        self.mentions_hooks().then(|| Hooks {
            before_sleep: self.before_sleep.map_or(were.before_sleep, shell),
            after_wake: self.after_wake.map_or(were.after_wake, shell),
            grace_ms: self.hook_grace.map_or(were.grace_ms, units::millis),
        })
    }
}

/// What is to be changed of how a sandbox sleeps and ends.
#[derive(Debug, Clone, Args)]
pub(super) struct PolicyChanges {
    #[command(flatten)]
    standby: StandbyArgs,
    /// Requests wake it again.
    #[arg(long, conflicts_with = "no_auto_wake")]
    auto_wake: bool,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    /// It never ends by itself any more.
    #[arg(long, conflicts_with_all = ["max_age", "expire_idle", "expire_at"])]
    no_expiry: bool,
}

impl PolicyChanges {
    /// None: it sleeps as before.
    pub(super) fn standby(&self, were: &StandbyPolicy) -> Option<Standby> {
        (self.standby.are_given() || self.auto_wake).then(|| {
            let standby = self.standby.clone().instead_of(were);
            Standby { auto_wake: standby.auto_wake.or(self.auto_wake.then_some(true)), ..standby }
        })
    }

    /// None: it ends as before.
    pub(super) fn lifetime(&self, was: Lifetime) -> Option<Lifetime> {
        match (self.no_expiry, self.lifetime.are_given()) {
            (true, _) => Some(Lifetime::default()),
            (false, true) => Some(self.lifetime.over(was)),
            (false, false) => None,
        }
    }
}

/// After how many milliseconds; none: never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Idle(Option<u64>);

impl Idle {
    pub(super) fn millis(self) -> Option<u64> {
        self.0
    }
}

pub(super) fn parse_idle(text: &str) -> Result<Idle, String> {
    if text == "never" {
        return Ok(Idle(None));
    }
    match units::millis(units::parse_duration(text)?) {
        0 => Err("it would sleep at once, always; `never` is never".to_owned()),
        ms => Ok(Idle(Some(ms))),
    }
}

fn shell(command: String) -> Vec<String> {
    if command.trim().is_empty() {
        return Vec::new();
    }
    vec!["/bin/sh".to_owned(), "-c".to_owned(), command]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_left_to_the_server() {
        assert_eq!(StandbyArgs::default().standby(), Standby::default());
        assert!(!StandbyArgs::default().are_given());
    }

    #[test]
    fn a_hook_is_a_shell_command_and_the_others_stay() {
        let were = StandbyPolicy {
            hooks: Hooks { before_sleep: vec!["sync".into()], ..Hooks::default() },
            ..StandbyPolicy::default()
        };
        let args = StandbyArgs { after_wake: Some("date > /now".into()), ..Default::default() };
        let hooks = args.instead_of(&were).hooks.unwrap();
        assert_eq!(hooks.before_sleep, ["sync"]);
        assert_eq!(hooks.after_wake, ["/bin/sh", "-c", "date > /now"]);
        let none = StandbyArgs { before_sleep: Some(String::new()), ..Default::default() };
        assert_eq!(none.instead_of(&were).hooks.unwrap().before_sleep, [""; 0]);
    }

    #[test]
    fn a_lifetime_keeps_what_is_not_mentioned() {
        let were = Lifetime { max_age_ms: Some(5), ..Lifetime::default() };
        let args = LifetimeArgs { expire_at: Some(9), ..LifetimeArgs::default() };
        let now = args.over(were);
        assert_eq!(
            (now.max_age_ms, now.expire_idle_ms, now.expires_at_ms),
            (Some(5), None, Some(9))
        );
    }
}
