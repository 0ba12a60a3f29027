//! Places where a test can kill the daemon, as a power cut would.
//!
//! Nothing of this is in a release build.

/// The daemon dies when it comes to the place of this name. For tests.
#[cfg(debug_assertions)]
pub fn arm(place: &str) {
    *ARMED.lock() = Some(place.to_owned());
}

#[cfg(debug_assertions)]
static ARMED: parking_lot::Mutex<Option<String>> = parking_lot::Mutex::new(None);

/// Dies here if armed.
#[cfg(debug_assertions)]
pub fn point(place: &'static str) {
    if ARMED.lock().as_deref() == Some(place) {
        tracing::error!(place, "dying as armed");
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

#[cfg(not(debug_assertions))]
pub fn point(_: &'static str) {}

/// Every place there is, in the order of a life.
pub const POINTS: &[&str] = &[
    "create.recorded",
    "start.begun",
    "start.machine",
    "start.greeted",
    "sleep.frozen",
    "save.staged",
    "save.written",
    "commit.placed",
    "save.committed",
    "save.recorded",
    "remove.dropped",
    "demote.begun",
    "demote.killed",
    "thaw.begun",
    "thaw.greeted",
    "snapshot.recorded",
    "snapshot.saved",
    "restore.recorded",
    "delete.erased",
    "delete.killed",
];

/// Every place on the way of a revision of a service to its traffic, and of a service out of the world.
pub const DEPLOY_POINTS: &[&str] = &[
    "deploy.recorded",
    "deploy.begun",
    "deploy.started",
    "deploy.healthy",
    "deploy.saved",
    "deploy.switched",
    "deploy.failed",
    "service.erased",
];

/// Every place on the way of a volume into a sandbox and out of it.
pub const MOUNT_POINTS: &[&str] = &[
    "mount.recorded",
    "mount.mounted",
    "unmount.unmounted",
    "unmount.unbound",
    "unmount.recorded",
];

/// Every place in the life of a volume.
pub const VOLUME_POINTS: &[&str] = &[
    "volume.made",
    "volume.placed",
    "volume.recorded",
    "volume.frozen",
    "volume.copied",
    "volume.lengthened",
    "volume.device_grown",
    "volume.unmounted",
    "volume.filesystem_grown",
    "volume.grown",
    "volume.erased",
];

/// Every place in the life of a task of a job, and of what it belongs to.
pub const TASK_POINTS: &[&str] = &[
    "execution.recorded",
    "task.claimed",
    "task.created",
    "task.awake",
    "task.prepared",
    "task.started",
    "task.noted",
    "task.ended",
    "task.collected",
    "task.settled",
    "task.deleted",
];

/// Every place in the life of an invocation of a service.
pub const INVOCATION_POINTS: &[&str] =
    &["invocation.recorded", "invocation.claimed", "invocation.answered", "invocation.settled"];

/// Every place between the record of a schedule's command and its process.
pub const FIRING_POINTS: &[&str] = &["firing.recorded", "firing.started", "firing.noted"];
