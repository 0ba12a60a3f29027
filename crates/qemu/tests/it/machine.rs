//! Machines of the tests: a kernel of twelve bytes that counts, in a jail of its own.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;
use tokio::time::Instant;
use torpor_qemu::build::{Accel, Build};
use torpor_qemu::jail::{self, Jail, Seen};
use torpor_qemu::line::{Line, Origin, inside};
use torpor_qemu::monitor::Monitor;

/// Nobody has this number.
pub(crate) const USER: u32 = 61_234;
pub(crate) const MEMORY_MIB: u64 = 16;
/// Where the guest counts.
const COUNTER: u64 = 0x30_0000;
pub(crate) const WAIT: Duration = Duration::from_secs(20);

/// `mov edi, COUNTER; xor eax, eax; again: inc eax; mov [edi], eax; jmp again`
const CODE: [u8; 12] = [0xbf, 0, 0, 0x30, 0, 0x31, 0xc0, 0x40, 0x89, 0x07, 0xeb, 0xfb];

/// A place for machines, and the QEMU that runs them.
pub(crate) struct Place {
    pub(crate) directory: TempDir,
    pub(crate) build: Build,
}

/// A QEMU, ended when dropped.
pub(crate) struct Machine {
    pub(crate) pid: Pid,
    pub(crate) home: PathBuf,
    pub(crate) jail: Jail,
}

impl Place {
    /// `None` says why on the way.
    pub(crate) async fn find() -> Option<Self> {
        Self::find_for(Accel::Tcg).await
    }

    pub(crate) async fn find_for(accel: Accel) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            torpor_testkit::missing("jails are made by root");
            return None;
        }
        match Build::find(None, accel).await {
            Ok(build) => Some(Self { directory: tempfile::tempdir().unwrap(), build }),
            Err(error) => {
                match accel {
                    Accel::Kvm => torpor_testkit::not_here(error),
                    Accel::Tcg => torpor_testkit::missing(error),
                }
                None
            }
        }
    }

    pub(crate) fn boot(&self, name: &str) -> Machine {
        let origin = Origin::Boot { mtu: 1500, tick_khz: self.build.tick_khz };
        let memory = self.file(&format!("{name}.memory"), &[]);
        File::options().write(true).open(&memory).unwrap().set_len(MEMORY_MIB << 20).unwrap();
        Machine::start(self.jail(name, origin, &memory)).unwrap()
    }

    pub(crate) fn revive(&self, name: &str, memory: &[u8]) -> Machine {
        let memory = self.file(&format!("{name}.memory"), memory);
        Machine::start(self.jail(name, Origin::Revive, &memory)).unwrap()
    }

    /// Everybody may read it, and only the disk belongs to QEMU.
    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        path
    }

    pub(crate) fn jail(&self, name: &str, origin: Origin, memory: &Path) -> Jail {
        let home = self.directory.path().join(name);
        let root = self.directory.path().join("root");
        fs::create_dir_all(&root).unwrap();
        fs::create_dir_all(home.join("run")).unwrap();
        let disk = self.file(&format!("{name}.disk"), &[0; 4096]);
        chown(&disk, Some(USER), Some(USER)).unwrap();
        let mut seen = self.build.seen();
        seen.extend([
            Seen::read(self.file("image", &[0; 4096]), inside::ROOT),
            Seen::write(disk, inside::DISK),
            Seen::read(memory, inside::MEMORY),
        ]);
        if matches!(origin, Origin::Boot { .. }) {
            seen.push(Seen::read(self.file("kernel", &kernel()), inside::KERNEL));
            seen.push(Seen::read(self.file("initramfs", b"none"), inside::INITRAMFS));
        }
        let line =
            Line { accel: self.build.accel, memory_mib: MEMORY_MIB, cpus: 1, card: None, origin };
        Jail {
            program: self.build.program.clone(),
            arguments: line.arguments(),
            user: USER,
            group: USER,
            more_groups: vec![],
            root,
            seen,
            run: home.join("run"),
            tap: None,
            kvm: self.build.accel == Accel::Kvm,
            pid_file: home.join("pid"),
        }
    }
}

impl Machine {
    /// The starter is a thread here: what it does to itself ends with it.
    pub(crate) fn start(jail: Jail) -> std::io::Result<Self> {
        let home = jail.pid_file.parent().unwrap().to_owned();
        let description = home.join("jail.json");
        fs::write(&description, serde_json::to_vec(&jail).unwrap()).unwrap();
        thread::spawn(move || jail::start(&description)).join().unwrap()?;
        let pid = fs::read_to_string(&jail.pid_file).unwrap().trim().parse().unwrap();
        Ok(Self { pid: Pid::from_raw(pid).unwrap(), home, jail })
    }

    pub(crate) async fn monitor(&self) -> Monitor {
        let socket = self.home.join("run").join(jail::MONITOR);
        Monitor::connect(&socket, Instant::now() + WAIT).await.unwrap()
    }

    /// What the kernel tells of it.
    pub(crate) fn proc(&self, file: &str) -> PathBuf {
        format!("/proc/{}/{file}", self.pid.as_raw_nonzero()).into()
    }

    /// A field of its status.
    pub(crate) fn status(&self, field: &str) -> String {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim_start_matches(':').split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// All of the guest's memory.
    pub(crate) fn memory(&self) -> Vec<u8> {
        let mut memory = vec![0; usize::try_from(MEMORY_MIB << 20).unwrap()];
        self.read(0, &mut memory);
        memory
    }

    pub(crate) fn counter(&self) -> u32 {
        let mut counter = [0; 4];
        self.read(COUNTER, &mut counter);
        u32::from_le_bytes(counter)
    }

    fn read(&self, at: u64, bytes: &mut [u8]) {
        let maps = fs::read_to_string(self.proc("maps")).unwrap();
        let map = maps.lines().find(|line| line.ends_with(inside::MEMORY)).unwrap();
        assert!(map.contains(" rw-p "), "{map}");
        let start = u64::from_str_radix(map.split('-').next().unwrap(), 16).unwrap();
        File::open(self.proc("mem")).unwrap().read_exact_at(bytes, start + at).unwrap();
    }

    /// Waits until the guest has counted past `count`.
    pub(crate) async fn counts_past(&self, count: u32) {
        let deadline = Instant::now() + WAIT;
        while self.counter() <= count {
            assert!(Instant::now() < deadline, "the guest does not count");
            tokio::task::yield_now().await;
        }
    }

    /// Waits for its end.
    pub(crate) async fn ends(self) -> i32 {
        let deadline = Instant::now() + WAIT;
        loop {
            if let Some((_, status)) = waitpid(Some(self.pid), WaitOptions::NOHANG).unwrap() {
                std::mem::forget(self);
                return status.exit_status().unwrap_or(-1);
            }
            assert!(Instant::now() < deadline, "QEMU does not end");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// A kernel as QEMU loads it: a program of 64 bits with one segment and a note that says where 32
/// bit code begins.
fn kernel() -> Vec<u8> {
    const BASE: u64 = 0x10_0000;
    const NOTE_AT: u64 = 0xb0;
    const CODE_AT: u64 = 0x1000;
    let mut note = Vec::new();
    for word in [4u32, 8, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(BASE.to_le_bytes());

    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for half in [2u16, 62] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1u32.to_le_bytes());
    for long in [BASE, 64, 0] {
        elf.extend(long.to_le_bytes());
    }
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 2, 64, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let size = CODE.len() as u64;
    let segments =
        [(1u32, 5u32, CODE_AT, BASE, size, 0x1000), (4, 4, NOTE_AT, 0, note.len() as u64, 4)];
    for (kind, flags, offset, address, size, align) in segments {
        elf.extend(kind.to_le_bytes());
        elf.extend(flags.to_le_bytes());
        for long in [offset, address, address, size, size, align] {
            elf.extend(long.to_le_bytes());
        }
    }
    elf.extend(note);
    elf.resize(usize::try_from(CODE_AT).unwrap(), 0);
    elf.extend(CODE);
    elf
}
