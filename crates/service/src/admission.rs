//! Which sandboxes may be: turns a request into a specification, or says what is wrong with it.
//! Pure: image, snapshot and host are looked up by the caller. Whether there is room for another
//! machine is asked in [`crate::room`]; whether there are the secrets and the way out that a network
//! names, in [`crate::calls`].

mod labels;
pub mod network;

use torpor_protocol::api::{CreateSandbox, Resize, Standby, UpdateSandbox};
use torpor_protocol::spec::Pairs;
use torpor_protocol::{
    Hooks, ImageId, Lifetime, PortAccess, Resources, SandboxSpec, SnapshotKind, StandbyPolicy,
};

pub(crate) use labels::check_labels;
use labels::check_not_ours;

/// Bytes of all variables together; they travel with every start of a machine in one frame.
const ENV_BYTES_MAX: usize = 64 * 1024;
/// Nobody means more; a larger number is a mistake in units.
const CPUS_MAX: f64 = 1024.0;
/// The granularity of the host's scheduler makes less than this useless.
const CPUS_MIN: f64 = 0.01;
/// Bytes of a hook's program and arguments: a command line, no script.
const HOOK_BYTES_MAX: usize = 16 * 1024;
/// Longer than this nobody waits for a hook: whoever asks for the sandbox waits for it, too.
const GRACE_MAX_MS: u64 = 60_000;
/// Secrets and exposed ports of one sandbox: more is a mistake.
const SECRETS_MAX: usize = 64;
const PORTS_MAX: usize = 256;
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

/// What a sandbox begins from.
#[derive(Debug, Clone)]
pub enum Origin<'a> {
    Image(Resolved),
    /// A restore point of a sandbox that was so.
    RestorePoint {
        kind: SnapshotKind,
        spec: &'a SandboxSpec,
    },
}

/// Why a request does not become a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Inadmissible {
    #[error("{field}: {why}")]
    Invalid { field: &'static str, why: String },
    #[error("{asked} MiB of memory were asked for, this host has {has}")]
    Memory { asked: u64, has: u64 },
}

fn invalid<T>(field: &'static str, why: impl Into<String>) -> Result<T, Inadmissible> {
    Err(Inadmissible::Invalid { field, why: why.into() })
}

/// The engine of whoever leaves it to the daemon.
const AUTO: &str = "auto";

/// What decides besides the request itself.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a> {
    pub defaults: &'a Resources,
    /// After so long a sandbox that does not say falls asleep.
    pub idle_after_ms: u64,
    pub host: Host,
    pub now_ms: u64,
}

/// The specification of the sandbox, complete.
pub fn admit(
    request: CreateSandbox,
    origin: Origin<'_>,
    terms: &Terms<'_>,
) -> Result<SandboxSpec, Inadmissible> {
    let usual = StandbyPolicy { idle_after_ms: terms.idle_after_ms, ..StandbyPolicy::default() };
    let (image, image_id, defaults, policy) = match &origin {
        Origin::Image(Resolved { name, id }) => (name, id, terms.defaults, usual),
        Origin::RestorePoint { kind, spec } => {
            check_locked(&request, *kind, &spec.resources)?;
            (&spec.image, &spec.image_id, &spec.resources, spec.standby.clone())
        }
    };
    let resources = Resources {
        cpus: request.cpus.unwrap_or(defaults.cpus),
        memory_mib: request.memory_mib.unwrap_or(defaults.memory_mib),
        disk_mib: request.disk_mib.unwrap_or(defaults.disk_mib),
        pids: request.pids.unwrap_or(defaults.pids),
    };
    // What is not asked for is as it was in what it begins from.
    let saved = match &origin {
        Origin::Image(_) => None,
        Origin::RestorePoint { spec, .. } => Some(*spec),
    };
    let mut env = saved.map_or_else(Pairs::new, |saved| saved.env.clone());
    env.extend(request.env);
    let or_saved = |asked: Vec<String>| match saved {
        Some(saved) if asked.is_empty() => saved.entrypoint.clone(),
        Some(_) | None => asked,
    };
    let spec = SandboxSpec {
        name: request.name,
        image: image.clone(),
        image_id: image_id.clone(),
        resources,
        env,
        labels: request.labels,
        network: request.network,
        lifetime: request.lifetime,
        standby: request.standby.over(policy),
        entrypoint: or_saved(request.entrypoint),
        secrets: match saved {
            Some(saved) if request.secrets.is_empty() => saved.secrets.clone(),
            Some(_) | None => request.secrets,
        },
        ports: request.ports.or_else(|| saved.and_then(|saved| saved.ports.clone())),
        engine: request
            .engine
            .filter(|asked| asked != AUTO)
            .or_else(|| saved.and_then(|saved| saved.engine.clone())),
        pool: None,
        mounts: Some(Vec::new()),
    };
    check_spec(&spec, terms)?;
    Ok(spec)
}

fn check_spec(spec: &SandboxSpec, terms: &Terms<'_>) -> Result<(), Inadmissible> {
    check_resources(&spec.resources)?;
    check_host(&spec.resources, terms)?;
    check_env(&spec.env)?;
    check_labels(&spec.labels)?;
    check_not_ours(&spec.labels, &Pairs::new())?;
    check_lifetime(&spec.lifetime, terms.now_ms)?;
    check_hooks(&spec.standby.hooks)?;
    check_words("entrypoint", &spec.entrypoint)?;
    network::check(&spec.network)?;
    if spec.secrets.len() > SECRETS_MAX {
        return invalid("secrets", format!("at most {SECRETS_MAX} are allowed"));
    }
    spec.ports.as_ref().map_or(Ok(()), check_ports)
}

fn check_host(resources: &Resources, terms: &Terms<'_>) -> Result<(), Inadmissible> {
    let (asked, has) = (resources.memory_mib, terms.host.memory_mib);
    if asked > has {
        return Err(Inadmissible::Memory { asked, has });
    }
    Ok(())
}

fn check_ports(ports: &PortAccess) -> Result<(), Inadmissible> {
    if ports.exposed.contains(&0) {
        return invalid("ports", "0 is no port");
    }
    if ports.exposed.len() > PORTS_MAX {
        return invalid("ports", format!("at most {PORTS_MAX} are allowed"));
    }
    Ok(())
}

/// What may be asked for besides what a pool says.
pub fn check_claim(request: &CreateSandbox) -> Result<(), Inadmissible> {
    check_env(&request.env)?;
    check_labels(&request.labels)?;
    check_not_ours(&request.labels, &Pairs::new())
}

/// Memory that was saved fits the machine it was saved from, and no other.
fn check_locked(
    request: &CreateSandbox,
    kind: SnapshotKind,
    has: &Resources,
) -> Result<(), Inadmissible> {
    if request.image.is_some() {
        return invalid("image", "a snapshot comes with its image; leave one of both out");
    }
    match kind {
        SnapshotKind::Filesystem => return Ok(()),
        SnapshotKind::Memory => {}
    }
    #[expect(clippy::float_cmp, reason = "the same number is the same wish")]
    let changed = [
        ("cpus", request.cpus.is_some_and(|cpus| cpus != has.cpus)),
        ("memory_mib", request.memory_mib.is_some_and(|mib| mib != has.memory_mib)),
        ("disk_mib", request.disk_mib.is_some_and(|mib| mib != has.disk_mib)),
        ("pids", request.pids.is_some_and(|pids| pids != has.pids)),
    ];
    let changed: Vec<_> =
        changed.into_iter().filter_map(|(name, changed)| changed.then_some(name)).collect();
    if changed.is_empty() {
        return Ok(());
    }
    let why = format!(
        "{} can't be changed: the resources of a memory snapshot are locked; a filesystem \
         snapshot begins with any",
        changed.join(", ")
    );
    invalid("snapshot", why)
}

/// Whether a sandbox may be changed so.
pub fn check_update(
    update: &UpdateSandbox,
    has: &SandboxSpec,
    terms: &Terms<'_>,
) -> Result<(), Inadmissible> {
    let UpdateSandbox { name: _, labels, lifetime, standby, network, ports, resources } = update;
    if let Some(labels) = labels {
        check_labels(labels)?;
        check_not_ours(labels, &has.labels)?;
    }
    lifetime.as_ref().map_or(Ok(()), |lifetime| check_lifetime(lifetime, terms.now_ms))?;
    network.as_ref().map_or(Ok(()), network::check)?;
    ports.as_ref().map_or(Ok(()), check_ports)?;
    if let Some(Resize { cpus, memory_mib, disk_mib }) = *resources {
        let has = &has.resources;
        let wanted = Resources {
            cpus: cpus.unwrap_or(has.cpus),
            memory_mib: memory_mib.unwrap_or(has.memory_mib),
            disk_mib: disk_mib.unwrap_or(has.disk_mib),
            pids: has.pids,
        };
        check_resources(&wanted)?;
        check_host(&wanted, terms)?;
    }
    standby.as_ref().and_then(|Standby { hooks, .. }| hooks.as_ref()).map_or(Ok(()), check_hooks)
}

fn check_hooks(hooks: &Hooks) -> Result<(), Inadmissible> {
    for hook in [&hooks.before_sleep, &hooks.after_wake] {
        check_words("hooks", hook)?;
    }
    if !(1..=GRACE_MAX_MS).contains(&hooks.grace_ms) {
        return invalid("hooks", format!("grace_ms must be from 1 to {GRACE_MAX_MS}"));
    }
    Ok(())
}

/// A command that Torpor itself starts.
fn check_words(field: &'static str, words: &[String]) -> Result<(), Inadmissible> {
    if words.first().is_some_and(String::is_empty) || words.iter().any(|word| word.contains('\0')) {
        return invalid(field, "it begins with its program, and no word contains NUL");
    }
    let bytes: usize = words.iter().map(|word| word.len() + 1).sum();
    if bytes > HOOK_BYTES_MAX {
        return invalid(field, format!("has {bytes} bytes, {HOOK_BYTES_MAX} are allowed"));
    }
    Ok(())
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

fn check_lifetime(lifetime: &Lifetime, now_ms: u64) -> Result<(), Inadmissible> {
    let Lifetime { max_age_ms, expire_idle_ms, expires_at_ms } = *lifetime;
    if max_age_ms == Some(0) || expire_idle_ms == Some(0) {
        return invalid("lifetime", "a time of 0 would end it at once; null is never");
    }
    if expires_at_ms.is_some_and(|at_ms| at_ms <= now_ms) {
        return invalid("lifetime", "expires_at is in the past");
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

    fn terms(defaults: &Resources) -> Terms<'_> {
        let host = Host { memory_mib: 4096 };
        Terms { defaults, idle_after_ms: 15_000, host, now_ms: NOW_MS }
    }

    fn try_admit(request: CreateSandbox) -> Result<SandboxSpec, Inadmissible> {
        let image = Resolved { name: "torpor/base".into(), id: "0".repeat(64).parse().unwrap() };
        admit(request, Origin::Image(image), &terms(&Resources::default()))
    }

    fn try_begin(request: CreateSandbox, kind: SnapshotKind) -> Result<SandboxSpec, Inadmissible> {
        let saved = CreateSandbox {
            cpus: Some(0.5),
            env: pairs(&[("A", "saved"), ("B", "saved")]),
            ..Default::default()
        };
        let spec = try_admit(saved).unwrap();
        let origin = Origin::RestorePoint { kind, spec: &spec };
        admit(request, origin, &terms(&Resources::default()))
    }

    fn check(update: &UpdateSandbox) -> Result<(), Inadmissible> {
        let has = try_admit(CreateSandbox::default()).unwrap();
        check_update(update, &has, &terms(&Resources::default()))
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
    fn the_resources_of_a_memory_snapshot_are_locked_by_name() {
        let request = CreateSandbox {
            cpus: Some(0.5),
            memory_mib: Some(2048),
            pids: Some(5000),
            ..Default::default()
        };
        let error = try_begin(request.clone(), SnapshotKind::Memory).unwrap_err().to_string();
        assert!(error.contains("memory_mib, pids") && !error.contains("cpus"), "{error}");
        let spec = try_begin(request, SnapshotKind::Filesystem).unwrap();
        assert_eq!((spec.resources.cpus, spec.resources.memory_mib), (0.5, 2048));
    }

    #[test]
    fn a_sandbox_begins_with_the_environment_it_was_saved_with() {
        let env = pairs(&[("B", "given")]);
        let request = CreateSandbox { env, ..Default::default() };
        let spec = try_begin(request, SnapshotKind::Memory).unwrap();
        assert_eq!(spec.env, pairs(&[("A", "saved"), ("B", "given")]));
    }

    #[test]
    fn an_image_beside_a_snapshot_is_refused() {
        let request = CreateSandbox { image: Some("x".into()), ..Default::default() };
        assert!(try_begin(request, SnapshotKind::Filesystem).is_err());
    }

    #[test]
    fn hooks_that_can_not_run_are_refused() {
        let hooks = |before_sleep: &[&str], grace_ms| Hooks {
            before_sleep: before_sleep.iter().map(|word| (*word).to_owned()).collect(),
            after_wake: Vec::new(),
            grace_ms,
        };
        let long = "x".repeat(HOOK_BYTES_MAX);
        let bad = [hooks(&[""], 1), hooks(&["a\0"], 1), hooks(&["sync"], 0), hooks(&[&long], 1)];
        for hooks in bad {
            let standby = Standby { hooks: Some(hooks), ..Default::default() };
            let update = UpdateSandbox { standby: Some(standby.clone()), ..Default::default() };
            assert!(check(&update).is_err(), "{standby:?}");
            assert!(try_admit(CreateSandbox { standby, ..Default::default() }).is_err());
        }
        let standby = Standby { hooks: Some(hooks(&["sync"], 1000)), ..Default::default() };
        try_admit(CreateSandbox { standby, ..Default::default() }).unwrap();
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
        let over = Lifetime { expires_at_ms: Some(NOW_MS - 1), ..Lifetime::default() };
        let none = Lifetime { max_age_ms: Some(0), ..Lifetime::default() };
        for lifetime in [over, none] {
            assert!(try_admit(CreateSandbox { lifetime, ..Default::default() }).is_err());
            let update = UpdateSandbox { lifetime: Some(lifetime), ..Default::default() };
            assert!(check(&update).is_err());
        }
    }
}
