//! From nothing to a machine: files, place in the network and cgroup, a QEMU in its jail, and a guest in
//! it that comes from a kernel or from a unit.
//!
//! ```text
//!   network slot, card ┐
//!   cgroup             ├─▶ starter (by the keeper) ─▶ QEMU, stopped ─▶ state, delta ─▶ go on
//!   memory, disk       ┘
//! ```
//!

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::Mode;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use torpor_lifecycle::engine::{BootPlan, EngineError};
use torpor_protocol::{Network as Policy, Resources, SandboxId};
use torpor_qemu::build::Accel;
use torpor_qemu::jail::{Jail, Seen};
use torpor_qemu::line::{self, Card, Line, inside};
use torpor_qemu::memory::GuestMemory;
use torpor_qemu::monitor::Monitor;
use torpor_qemu::processor::processor;
use torpor_qemu::unit::{self, About, Unit, UnitId};

use super::Qemu;
use super::channel::LineChannel;
use super::control::QemuControl;
use super::layout::MachineDir;
use crate::directory::fresh;
use crate::disk;
use crate::host::{
    HostMachine, Origin, Parts, Shared, Steps, Wanted, blocking, last_line, process_in, still,
};
use crate::keeper::Ended;
use crate::limits::Group;
use crate::machines::{MachineId, MarkFile, Process, Record};
use crate::network::Slot;

/// The group of all QEMUs: it may read what machines begin from. Files of saves have it.
pub(super) const READERS: u32 = 0x546f_ffff;
/// Starting a QEMU takes some ten milliseconds; a hundred times that on a busy host.
const START_MAX: Duration = Duration::from_secs(60);
/// Threads of a QEMU: one for each processor, and those that wait for files.
const TASKS_MAX: u32 = 256;
/// Beside a machine: what it began from.
const BEGAN: &str = "began.json";
const PLACING: &str = "make the machine's memory and disk";

/// What a guest begins from, at hand.
pub(super) enum Begin {
    Kernel,
    Unit(Box<Unit>),
}

impl Begin {
    /// Memory and disk of the unit, if it is one.
    fn files(&self) -> io::Result<Option<(File, File)>> {
        let Self::Unit(unit) = self else { return Ok(None) };
        Ok(Some((unit.memory.try_clone()?, unit.disk.try_clone()?)))
    }
}

/// Whose machine it becomes.
pub(super) struct Owner {
    pub(super) sandbox: Option<SandboxId>,
    pub(super) network: Policy,
}

/// A machine that is being started.
pub(super) struct Start<'a> {
    pub(super) host: &'a Arc<Shared<Qemu>>,
    pub(super) plan: &'a BootPlan,
}

impl Start<'_> {
    /// Goes through all steps; on `Err` nothing is left.
    pub(super) async fn run(
        &self,
        origin: &Origin,
        wanted: Wanted<'_>,
    ) -> Result<HostMachine<Qemu>, EngineError> {
        let begun = Instant::now();
        let dir = match origin {
            Origin::Image => self.host.template(self.plan).await?,
            Origin::Save { dir, .. } => dir.clone(),
        };
        let found = begun.elapsed();
        let unit = self.open(&dir).await?;
        let plan = self.plan;
        let owner = Owner { sandbox: Some(plan.id.clone()), network: plan.spec.network.clone() };
        let machine = self.make(Begin::Unit(Box::new(unit)), owner, wanted).await?;
        Ok(match origin {
            Origin::Image => machine.with_step("template", found),
            Origin::Save { .. } => machine,
        })
    }

    /// A unit that can go on here.
    async fn open(&self, dir: &Path) -> Result<Unit, EngineError> {
        const WHAT: &str = "revive the machine";
        let dir = dir.to_owned();
        let unit = blocking(WHAT, move || unit::open(&dir)).await?;
        let About { memory_bytes, disk_bytes, qemu, kernel, cpu, accel, .. } = &unit.about;
        let Qemu { build, kernel: here, .. } = &self.host.backend;
        let facts = [
            ("QEMU", qemu, build.text.as_str()),
            ("kernel", kernel, here.id.as_str()),
            ("processor", cpu, processor(build.accel)),
            ("acceleration", accel, build.accel.name()),
        ];
        for (what, then, now) in facts {
            if then != now {
                let why = format!("it was saved with {what} {then} and this host has {now}");
                return Err(EngineError::failed(WHAT)(why));
            }
        }
        let Resources { memory_mib, disk_mib, .. } = self.plan.spec.resources;
        for (what, then, now) in
            [("memory", memory_bytes >> 20, memory_mib), ("disk", disk_bytes >> 20, disk_mib)]
        {
            if then != now {
                let why = format!("it has {then} MiB of {what}, which can't become {now} MiB");
                return Err(EngineError::failed(WHAT)(why));
            }
        }
        Ok(unit)
    }

    /// A machine in which the guest runs; on `Err` nothing is left.
    pub(super) async fn make(
        &self,
        begin: Begin,
        owner: Owner,
        wanted: Wanted<'_>,
    ) -> Result<HostMachine<Qemu>, EngineError> {
        let (id, mut steps) = (MachineId::random(), Steps::new());
        let sandbox = owner.sandbox.clone();
        let made = self.steps(&id, begin, owner, wanted, &mut steps).await;
        self.host.finish_start(made, &id, sandbox.as_ref(), steps).await
    }

    async fn steps(
        &self,
        id: &MachineId,
        begin: Begin,
        owner: Owner,
        wanted: Wanted<'_>,
        steps: &mut Steps,
    ) -> Result<HostMachine<Qemu>, EngineError> {
        let dir = self.host.footprint.layout.machine(id);
        let mut clock = Instant::now();
        let mut step = |name: &'static str, steps: &mut Steps| {
            let now = Instant::now();
            steps.push((name, now - clock));
            clock = now;
        };
        let about = self.about(&begin)?;
        let (group, slot, tap) = self.prepare(id, &dir, &begin, &about).await?;
        step("prepare", steps);
        still(wanted)?;
        let jail = self.jail(id, &dir, &begin, &about, (&slot, tap));
        let process = self.spawn(id, &dir, &group, &jail).await?;
        step("jail", steps);
        let monitor = Monitor::connect(&dir.monitor, Instant::now() + START_MAX).await;
        let mut monitor = monitor.map_err(EngineError::failed("reach QEMU"))?;
        step("QEMU", steps);
        still(wanted)?;

        let channel = LineChannel::connect(&dir.agent).await;
        let channel = channel.map_err(EngineError::failed("reach the machine's agent"))?;
        let record = self.record(id, &owner, &process, &slot);
        write_began(&dir, &about)?;
        // Nobody's is said to be a sandbox of its own, which reaches nothing.
        self.host.assign(&record, &slot, &self.plan.id).await?;
        if let Begin::Unit(unit) = begin {
            load(&mut monitor, process.pid, &dir, *unit).await?;
            step("state", steps);
        }
        still(wanted)?;
        let mark = MarkFile::create(&dir.mark)?;
        let pidfd = process.open().ok_or_else(|| EngineError::failed("watch QEMU")("it ended"))?;
        monitor.resume().await.map_err(EngineError::failed("let the guest go on"))?;
        let control =
            QemuControl::new(&dir, process.pid, about, group.clone(), mark).begun(monitor);
        let parts = Parts { record, slot, group, channel, pidfd, control };
        HostMachine::new(self.host.clone(), parts)
    }

    /// What the machine's saves will be of.
    fn about(&self, begin: &Begin) -> Result<About, EngineError> {
        let Qemu { build, kernel, .. } = &self.host.backend;
        let resources = &self.plan.spec.resources;
        Ok(match begin {
            Begin::Unit(unit) => unit.about.clone(),
            Begin::Kernel => About {
                format: About::FORMAT,
                unit: UnitId::random().map_err(EngineError::failed("name the machine's memory"))?,
                base: None,
                memory_bytes: resources.memory_mib << 20,
                disk_bytes: resources.disk_mib << 20,
                cpus: self.host.backend.processors(resources),
                qemu: build.text.clone(),
                kernel: kernel.id.clone(),
                cpu: processor(build.accel).to_owned(),
                accel: build.accel.name().to_owned(),
                state_hash: String::new(),
            },
        })
    }

    /// Slot, cgroup and files, side by side.
    async fn prepare(
        &self,
        id: &MachineId,
        dir: &MachineDir,
        begin: &Begin,
        about: &About,
    ) -> Result<(Group, Slot, PathBuf), EngineError> {
        let made = [&dir.dir, &dir.root, &dir.run].into_iter().try_for_each(|dir| fresh(dir));
        made.map_err(EngineError::failed("make the machine's directory"))?;
        let slot = async {
            let slot = self.host.network().take().await?;
            let tap = slot.tap().await?;
            Ok::<_, crate::network::NetworkError>((slot, tap.path))
        };
        let (footprint, machine) = (self.host.footprint.clone(), id.clone());
        let limits = self.limits(about);
        let group = blocking("make the machine's cgroup", move || {
            Group::create(&footprint.hierarchy, &footprint.tag, machine.as_str(), &limits)
        });
        let from = begin.files().map_err(EngineError::failed(PLACING))?;
        let (to, of) = (dir.clone(), about.clone());
        let files = spawn_blocking(move || place(&to, &of, from));
        // All to the end, also when one fails: what was begun is known to be there or not.
        let (files, group, slot) = tokio::join!(files, group, slot);
        let (slot, tap) = slot.map_err(EngineError::failed("give the machine a network"))?;
        let placed = files.map_err(EngineError::failed(PLACING))?;
        placed.map_err(full_or_failed)?;
        let group = group?;
        let user = self.host.user_of(&slot);
        let own = File::options().write(true).open(&dir.disk);
        let owned = own.and_then(|disk| fchown(&disk, Some(user), Some(user)));
        owned.map_err(EngineError::failed("give the machine its disk"))?;
        Ok((group, slot, tap))
    }

    /// What its cgroup allows: the guest's memory is all of a QEMU but a little.
    fn limits(&self, about: &About) -> Resources {
        // What a QEMU needs besides; with what an emulating one translates.
        let overhead = match self.host.backend.build.accel {
            Accel::Kvm => 96,
            Accel::Tcg => 224,
        };
        Resources {
            memory_mib: (about.memory_bytes >> 20) + overhead,
            pids: TASKS_MAX,
            ..self.plan.spec.resources
        }
    }

    /// By which people and tools find it among the processes of the host.
    fn name(&self, id: &MachineId) -> Vec<String> {
        vec!["-name".to_owned(), format!("{}-{id}", self.host.footprint.tag)]
    }

    fn jail(
        &self,
        id: &MachineId,
        dir: &MachineDir,
        begin: &Begin,
        about: &About,
        (slot, tap): (&Slot, PathBuf),
    ) -> Jail {
        let Qemu { build, kernel, .. } = &self.host.backend;
        let mut seen = build.seen();
        seen.push(Seen::read(&self.plan.root, inside::ROOT));
        seen.push(Seen::read(&dir.memory, inside::MEMORY));
        seen.push(Seen::write(&dir.disk, inside::DISK));
        let link = slot.link();
        let origin = match begin {
            Begin::Unit(_) => line::Origin::Revive,
            Begin::Kernel => {
                seen.push(Seen::read(&kernel.vmlinux, inside::KERNEL));
                seen.push(Seen::read(self.host.footprint.layout.initramfs(), inside::INITRAMFS));
                line::Origin::Boot { mtu: link.mtu, tick_khz: build.tick_khz }
            }
        };
        let line = Line {
            accel: build.accel,
            memory_mib: about.memory_bytes >> 20,
            cpus: about.cpus,
            card: Some(Card { mac: link.mac }),
            origin,
        };
        let user = self.host.user_of(slot);
        Jail {
            program: build.program.clone(),
            arguments: [line.arguments(), self.name(id)].concat(),
            user,
            group: user,
            more_groups: vec![READERS],
            root: dir.root.clone(),
            seen,
            run: dir.run.clone(),
            tap: Some(tap),
            kvm: build.accel == Accel::Kvm,
            pid_file: dir.pid.clone(),
        }
    }

    /// Has the keeper run the starter, and finds the QEMU that it started.
    async fn spawn(
        &self,
        id: &MachineId,
        dir: &MachineDir,
        group: &Group,
        jail: &Jail,
    ) -> Result<Process, EngineError> {
        let text = serde_json::to_vec(jail).map_err(EngineError::failed("describe the jail"))?;
        std::fs::write(&dir.jail, text).map_err(EngineError::failed("describe the jail"))?;
        let command = &self.host.backend.jail_command;
        let spawned = self.host.spawn(id, command, &dir.jail, group, START_MAX).await;
        let (ended, stderr) = spawned.map_err(EngineError::failed("start QEMU"))?;
        if ended != (Ended::Code { code: 0 }) {
            let line = last_line(&stderr);
            let line = line.as_deref().unwrap_or_default();
            return Err(EngineError::failed("start QEMU")(format!("{ended}: {line}")));
        }
        process_in(&dir.pid, |_| {}).map_err(EngineError::failed("find QEMU's process"))
    }

    fn record(&self, id: &MachineId, owner: &Owner, process: &Process, slot: &Slot) -> Record {
        Record {
            id: id.clone(),
            sandbox: owner.sandbox.clone(),
            process: process.clone(),
            slot: slot.number(),
            network: owner.network.clone(),
            build: self.host.backend.version.clone(),
        }
    }
}

/// What a machine began from, kept beside it for the daemon that saves it.
fn write_began(dir: &MachineDir, about: &About) -> Result<(), EngineError> {
    let text = serde_json::to_vec(about).expect("it has text keys only");
    std::fs::write(dir.dir.join(BEGAN), text)
        .map_err(EngineError::failed("note what the machine began from"))
}

pub(super) fn read_began(dir: &MachineDir) -> Option<About> {
    serde_json::from_slice(&std::fs::read(dir.dir.join(BEGAN)).ok()?).ok()
}

/// Puts memory and disk in their places; `from`: those of a unit. Blocks.
fn place(dir: &MachineDir, about: &About, from: Option<(File, File)>) -> io::Result<()> {
    let Some((memory, disk)) = from else {
        let memory = unit::create(&dir.memory, Some(READERS))?;
        unit::fresh_memory(&memory, about.memory_bytes, &about.unit)?;
        return disk::format(&unit::create(&dir.disk, None)?, about.disk_bytes >> 20);
    };
    unit::link_or_copy(&memory, &dir.memory, Some(READERS))?;
    readable(&memory)?;
    unit::copy_disk(&disk, &unit::create(&dir.disk, None)?, about.disk_bytes, None)
}

/// A save that was imported is root's alone until it is used.
fn readable(memory: &File) -> io::Result<()> {
    if memory.metadata()?.gid() != READERS {
        fchown(memory, None, Some(READERS))?;
        rustix::fs::fchmod(memory, Mode::from_raw_mode(0o640))?;
    }
    Ok(())
}

/// Brings memory and device state of a unit into a QEMU that waits for them. Memory first: devices look
/// into it while their state is loaded, at how far the rings are that they share with the guest.
async fn load(
    monitor: &mut Monitor,
    pid: i32,
    dir: &MachineDir,
    unit: Unit,
) -> Result<(), EngineError> {
    const WHAT: &str = "revive the machine";
    let Unit { about, delta, state, .. } = unit;
    if let Some(delta) = delta {
        let memory = dir.memory.clone();
        blocking(WHAT, move || {
            GuestMemory::of(pid, &File::open(memory)?, about.memory_bytes)?.copy_in(&delta)
        })
        .await?;
    }
    let state = read_all(&state).map_err(EngineError::failed(WHAT))?;
    monitor.load_state(&state).await.map_err(EngineError::failed(WHAT))
}

/// Of a file whose size was looked at.
fn read_all(mut file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn full_or_failed(error: io::Error) -> EngineError {
    if error.kind() == io::ErrorKind::StorageFull {
        return EngineError::DiskFull(format!("the machine has no room: {error}"));
    }
    EngineError::failed(PLACING)(error)
}
