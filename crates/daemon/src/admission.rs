//! Which sandboxes may be created: turns a request into a specification, or says what is wrong with
//! it. Pure: image and host are looked up by the caller.

use torpor_protocol::api::{CreateSandbox, UpdateSandbox};
use torpor_protocol::spec::Pairs;
use torpor_protocol::{ImageId, Lifetime, Resources, SandboxSpec};

/// Labels of one sandbox, and the bytes of each name and value: enough to sort by, no database.
const LABELS_MAX: usize = 64;
const LABEL_BYTES_MAX: usize = 256;
/// Bytes of all variables together; they travel with every start of a machine in one frame.
const ENV_BYTES_MAX: usize = 64 * 1024;
/// Nobody means more; a larger number is a mistake in units.
const CPUS_MAX: f64 = 1024.0;
/// The granularity of the host's scheduler makes less than this useless.
const CPUS_MIN: f64 = 0.01;
/// The largest process id space of Linux.
const PIDS_MAX: u32 = 4 * 1024 * 1024;

/// What this host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    pub memory_mib: u64,
}

impl Host {
    pub fn here() -> Self {
        let info = rustix::system::sysinfo();
        let bytes = info.totalram.saturating_mul(u64::from(info.mem_unit));
        Self { memory_mib: bytes / (1024 * 1024) }
    }
}

/// The image that a request names, looked up.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub name: String,
    pub id: ImageId,
}

/// Why a request does not become a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Inadmissible {
    #[error("{field}: {why}")]
    Invalid { field: &'static str, why: String },
    #[error("{asked} MiB of memory were asked for, this host has {has}")]
    Memory { asked: u64, has: u64 },
    #[error("this host has its {0} sandboxes")]
    Full(usize),
}

fn invalid<T>(field: &'static str, why: impl Into<String>) -> Result<T, Inadmissible> {
    Err(Inadmissible::Invalid { field, why: why.into() })
}

/// What decides besides the request itself.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a> {
    pub defaults: &'a Resources,
    pub host: Host,
    /// How many sandboxes there are, and may be.
    pub present: usize,
    pub allowed: usize,
    pub now_ms: u64,
}

/// The specification of the sandbox, complete.
pub fn admit(
    request: CreateSandbox,
    image: Resolved,
    terms: &Terms<'_>,
) -> Result<SandboxSpec, Inadmissible> {
    let CreateSandbox {
        name,
        image: _,
        cpus,
        memory_mib,
        disk_mib,
        pids,
        env,
        labels,
        network,
        lifetime,
    } = request;
    let defaults = terms.defaults;
    let resources = Resources {
        cpus: cpus.unwrap_or(defaults.cpus),
        memory_mib: memory_mib.unwrap_or(defaults.memory_mib),
        disk_mib: disk_mib.unwrap_or(defaults.disk_mib),
        pids: pids.unwrap_or(defaults.pids),
    };
    check_resources(&resources)?;
    check_env(&env)?;
    check_labels(&labels)?;
    check_lifetime(&lifetime, terms.now_ms)?;
    if resources.memory_mib > terms.host.memory_mib {
        let (asked, has) = (resources.memory_mib, terms.host.memory_mib);
        return Err(Inadmissible::Memory { asked, has });
    }
    if terms.present >= terms.allowed {
        return Err(Inadmissible::Full(terms.allowed));
    }
    let Resolved { name: image, id: image_id } = image;
    Ok(SandboxSpec { name, image, image_id, resources, env, labels, network, lifetime })
}

/// Whether a sandbox may be changed so.
pub fn check_update(update: &UpdateSandbox, now_ms: u64) -> Result<(), Inadmissible> {
    let UpdateSandbox { labels, lifetime } = update;
    labels.as_ref().map_or(Ok(()), check_labels)?;
    lifetime.as_ref().map_or(Ok(()), |lifetime| check_lifetime(lifetime, now_ms))
}

/// Whether any sandbox could be so.
pub fn check_resources(resources: &Resources) -> Result<(), Inadmissible> {
    let Resources { cpus, memory_mib, disk_mib, pids } = *resources;
    if !cpus.is_finite() || !(CPUS_MIN..=CPUS_MAX).contains(&cpus) {
        return invalid("cpus", format!("must be a number from {CPUS_MIN} to {CPUS_MAX}"));
    }
    if memory_mib < Resources::MEMORY_MIN_MIB {
        return invalid("memory_mib", format!("must be at least {}", Resources::MEMORY_MIN_MIB));
    }
    if disk_mib < Resources::DISK_MIN_MIB {
        return invalid("disk_mib", format!("must be at least {}", Resources::DISK_MIN_MIB));
    }
    // What is written must stay a number of bytes that filesystems know.
    if disk_mib > i64::MAX as u64 >> 20 {
        return invalid("disk_mib", "is larger than any disk");
    }
    if !(Resources::PIDS_MIN..=PIDS_MAX).contains(&pids) {
        return invalid("pids", format!("must be from {} to {PIDS_MAX}", Resources::PIDS_MIN));
    }
    Ok(())
}

fn check_env(env: &Pairs) -> Result<(), Inadmissible> {
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return invalid("env", format!("{:?} is no name of a variable", clip(name)));
        }
        if value.contains('\0') {
            return invalid("env", format!("the value of {:?} contains NUL", clip(name)));
        }
    }
    let bytes: usize = env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    if bytes > ENV_BYTES_MAX {
        return invalid("env", format!("has {bytes} bytes, {ENV_BYTES_MAX} are allowed"));
    }
    Ok(())
}

fn check_labels(labels: &Pairs) -> Result<(), Inadmissible> {
    if labels.len() > LABELS_MAX {
        return invalid("labels", format!("there are {}, {LABELS_MAX} are allowed", labels.len()));
    }
    for (name, value) in labels {
        if name.is_empty() || name.contains('=') || name.chars().any(char::is_control) {
            return invalid("labels", format!("{:?} is no name of a label", clip(name)));
        }
        if name.len() > LABEL_BYTES_MAX || value.len() > LABEL_BYTES_MAX {
            let why = format!("{:?} is longer than {LABEL_BYTES_MAX} bytes", clip(name));
            return invalid("labels", why);
        }
    }
    Ok(())
}

fn check_lifetime(lifetime: &Lifetime, now_ms: u64) -> Result<(), Inadmissible> {
    let Lifetime { max_age_secs, expire_idle_secs, expire_at } = *lifetime;
    if max_age_secs == Some(0) || expire_idle_secs == Some(0) {
        return invalid("lifetime", "a time of 0 seconds would end it at once");
    }
    if expire_at.is_some_and(|secs| secs.saturating_mul(1000) <= now_ms) {
        return invalid("lifetime", "expire_at is in the past (it is in Unix seconds)");
    }
    Ok(())
}

/// Whoever sends a megabyte as a name need not get it back.
fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_800_000_000_000;

    fn try_admit(request: CreateSandbox) -> Result<SandboxSpec, Inadmissible> {
        let image = Resolved { name: "torpor/base".into(), id: "0".repeat(64).parse().unwrap() };
        let terms = Terms {
            defaults: &Resources::default(),
            host: Host { memory_mib: 4096 },
            present: 3,
            allowed: 4,
            now_ms: NOW_MS,
        };
        admit(request, image, &terms)
    }

    fn pairs(pairs: &[(&str, &str)]) -> Pairs {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_is_not_asked_for_is_the_default() {
        let spec = try_admit(CreateSandbox { cpus: Some(0.5), ..Default::default() }).unwrap();
        assert_eq!(spec.resources, Resources { cpus: 0.5, ..Resources::default() });
        assert_eq!(spec.image, "torpor/base");
    }

    #[test]
    fn senseless_resources_are_refused_by_field() {
        for cpus in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            let error = try_admit(CreateSandbox { cpus: Some(cpus), ..Default::default() });
            assert!(matches!(error, Err(Inadmissible::Invalid { field: "cpus", .. })), "{cpus}");
        }
        for (request, name) in [
            (CreateSandbox { memory_mib: Some(63), ..Default::default() }, "memory_mib"),
            (CreateSandbox { disk_mib: Some(0), ..Default::default() }, "disk_mib"),
            (CreateSandbox { disk_mib: Some(u64::MAX), ..Default::default() }, "disk_mib"),
            (CreateSandbox { pids: Some(10), ..Default::default() }, "pids"),
        ] {
            let error = try_admit(request).unwrap_err();
            assert!(error.to_string().starts_with(name), "{error}");
        }
    }

    #[test]
    fn more_memory_than_the_host_has_is_a_matter_of_capacity() {
        let request = CreateSandbox { memory_mib: Some(4097), ..Default::default() };
        assert_eq!(
            try_admit(request).unwrap_err(),
            Inadmissible::Memory { asked: 4097, has: 4096 }
        );
    }

    #[test]
    fn a_full_host_takes_no_more() {
        let image = Resolved { name: "x".into(), id: "0".repeat(64).parse().unwrap() };
        let terms = Terms {
            defaults: &Resources::default(),
            host: Host { memory_mib: 4096 },
            present: 4,
            allowed: 4,
            now_ms: NOW_MS,
        };
        let error = admit(CreateSandbox::default(), image, &terms).unwrap_err();
        assert_eq!(error, Inadmissible::Full(4));
    }

    #[test]
    fn variables_that_no_process_can_have_are_refused() {
        for env in [pairs(&[("", "x")]), pairs(&[("A=B", "x")]), pairs(&[("A", "x\0y")])] {
            assert!(try_admit(CreateSandbox { env, ..Default::default() }).is_err());
        }
        let env = pairs(&[("A", "=x="), ("LONG", &"y".repeat(1000))]);
        try_admit(CreateSandbox { env, ..Default::default() }).unwrap();
    }

    #[test]
    fn labels_have_limits() {
        let many = (0..65).map(|n| (n.to_string(), String::new())).collect();
        let long = pairs(&[("k", &"v".repeat(257))]);
        for labels in [many, long, pairs(&[("a=b", "")]), pairs(&[("a\nb", "")])] {
            assert!(try_admit(CreateSandbox { labels, ..Default::default() }).is_err());
        }
        let labels = pairs(&[("team", "blue"), ("k", &"v".repeat(256))]);
        try_admit(CreateSandbox { labels, ..Default::default() }).unwrap();
    }

    #[test]
    fn a_life_that_is_over_before_it_began_is_refused() {
        let over = Lifetime { expire_at: Some(NOW_MS / 1000 - 1), ..Lifetime::default() };
        let none = Lifetime { max_age_secs: Some(0), ..Lifetime::default() };
        for lifetime in [over, none] {
            assert!(try_admit(CreateSandbox { lifetime, ..Default::default() }).is_err());
            let update = UpdateSandbox { lifetime: Some(lifetime), ..Default::default() };
            assert!(check_update(&update, NOW_MS).is_err());
        }
    }
}
