//! The guest that is run: six pages in 64-bit mode, without interrupts, devices or a kernel.
//!
//! ```text
//!   0x0000   page tables: three pages that map the first 2 MiB onto themselves
//!   0x3000   the program
//!   0x4000   the sixteen bytes it exchanges
//! ```

use std::cell::UnsafeCell;
use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use tokio::time::Instant;

use super::{End, Ran, STOP, Step};

const PAGE: usize = 0x1000;
const TABLES: usize = 0;
const PROGRAM: usize = 3 * PAGE;
const DATA: usize = 4 * PAGE;
const SIZE: usize = 5 * PAGE;

/// What is there before the exchange, and after it in the lower half; the upper half becomes 0.
const BEFORE: [u64; 2] = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];
const AFTER: u64 = 0x5555_aaaa_5555_aaaa;

/// An instruction a line. One word at the end of each step; registers are set before.
const CODE: [&[u8]; 12] = [
    &[0xe6, Step::Enter.port()],     // out   port, al
    &[0x48, 0xff, 0xc9],             // dec   rcx
    &[0x75, 0xfb],                   // jnz   the line above
    &[0xe6, Step::WarmUp.port()],    // out   port, al
    &[0xf0, 0x48, 0x0f, 0xc7, 0x0f], // lock cmpxchg16b [rdi]
    &[0x0f, 0x94, 0xc0],             // sete  al
    &[0x66, 0x0f, 0xef, 0xc0],       // pxor  xmm0, xmm0
    &[0xe6, Step::Exchange.port()],  // out   port, al
    &[0x48, 0x89, 0xf1],             // mov   rcx, rsi
    &[0x48, 0xff, 0xc9, 0x75, 0xfb], // dec   rcx; jnz back to it
    &[0xe6, Step::Race.port()],      // out   port, al
    &[0xf4, 0xf4],                   // hlt
];

/// In a page table: there, may be written, and covers 2 MiB.
const ENTRY: u64 = 0b11;
const ENTRY_LARGE: u64 = ENTRY | 1 << 7;

/// Protected mode, its coprocessor as all processors have it, write protection, paging.
const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
/// Long page tables, and SSE may be used.
const CR4: u64 = 1 << 5 | 1 << 9 | 1 << 10;
/// 64-bit mode is on and active.
const EFER: u64 = 1 << 8 | 1 << 10;
/// The one bit of the flags that is always 1.
const FLAGS: u64 = 1 << 1;
/// Three pages that Intel's KVM wants somewhere in the first 4 GiB, away from memory.
const TSS: usize = 0xfffb_d000;

/// Why there is no guest.
#[derive(Debug)]
pub(super) enum Trouble {
    Absent,
    Denied,
    Other(String),
}

/// What the guest has for memory; it writes there behind the compiler's back.
#[repr(C, align(4096))]
struct Memory(UnsafeCell<[u8; SIZE]>);

/// A machine with one processor. The memory goes last.
pub(super) struct Guest {
    processor: VcpuFd,
    _machine: VmFd,
    memory: Box<Memory>,
    warm_up: u64,
    race: u64,
}

impl Guest {
    /// Ready for its first step. It counts so often before and after the exchange.
    pub(super) fn new(warm_up: u64, race: u64) -> Result<Self, Trouble> {
        let kvm = Kvm::new().map_err(|error| unopened(error.errno()))?;
        let version = kvm.get_api_version();
        if u32::try_from(version) != Ok(KVM_API_VERSION) {
            return Err(Trouble::Other(format!("its version is {version}, not {KVM_API_VERSION}")));
        }
        let machine = kvm.create_vm().map_err(failed("make a machine"))?;
        machine.set_tss_address(TSS).map_err(failed("make room for a task segment"))?;
        let memory = Memory::new();
        memory.give(&machine).map_err(failed("give a machine memory"))?;
        let processor = machine.create_vcpu(0).map_err(failed("make a processor"))?;
        let features = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        features
            .and_then(|features| processor.set_cpuid2(&features))
            .map_err(failed("describe a processor"))?;
        set_registers(&processor, warm_up, race).map_err(failed("set registers"))?;
        let_stop(&processor).map_err(failed("make a guest stoppable"))?;
        Ok(Self { processor, _machine: machine, memory, warm_up, race })
    }

    /// Until the end of the step, or until the thread gets [`STOP`].
    pub(super) fn run(&mut self, step: Step) -> Ran {
        let begun = Instant::now();
        let exit = self.processor.run();
        let took = begun.elapsed();
        let end = match exit {
            Ok(VcpuExit::IoOut(port, &[value])) => End::Said { port, value },
            Ok(VcpuExit::InternalError) => End::Failed(self.internal_error()),
            Ok(other) => End::Failed(format!("it stopped with {other:?}")),
            Err(error) if error.errno() == libc::EINTR => self.stopped(step),
            Err(error) => End::Failed(text(error.errno())),
        };
        Ran { end, took }
    }

    fn stopped(&self, step: Step) -> End {
        let goal = match step {
            Step::Enter | Step::Exchange => 0,
            Step::WarmUp => self.warm_up,
            Step::Race => self.race,
        };
        let left = self.processor.get_regs().map_or(goal, |registers| registers.rcx);
        End::Stopped { counted: goal.saturating_sub(left) }
    }

    #[expect(unsafe_code, reason = "which part of the union is valid is for us to know")]
    fn internal_error(&mut self) -> String {
        // SAFETY: the kernel fills this part when it says that an error of its own stopped the guest,
        // which is when this is called; any bits are a valid number.
        match unsafe { self.processor.get_kvm_run().__bindgen_anon_1.internal.suberror } {
            kvm_bindings::KVM_INTERNAL_ERROR_EMULATION => {
                "it interprets instructions and does not know this one".to_owned()
            }
            other => format!("error {other} in the kernel"),
        }
    }

    /// Whether the exchange can be seen from outside.
    pub(super) fn exchanged(&self) -> bool {
        self.memory.words(DATA) == [AFTER, 0]
    }
}

impl Memory {
    fn new() -> Box<Self> {
        let mut memory = Box::new(Self(UnsafeCell::new([0; SIZE])));
        let bytes = memory.0.get_mut();
        for (at, entry) in [
            (TABLES, (TABLES + PAGE) as u64 | ENTRY),
            (TABLES + PAGE, (TABLES + 2 * PAGE) as u64 | ENTRY),
            (TABLES + 2 * PAGE, ENTRY_LARGE),
            (DATA, BEFORE[0]),
            (DATA + 8, BEFORE[1]),
        ] {
            bytes[at..at + 8].copy_from_slice(&entry.to_le_bytes());
        }
        let code = CODE.concat();
        bytes[PROGRAM..PROGRAM + code.len()].copy_from_slice(&code);
        memory
    }

    #[expect(unsafe_code, reason = "a guest gets memory of this process")]
    fn give(&self, machine: &VmFd) -> Result<(), kvm_ioctls::Error> {
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: SIZE as u64,
            userspace_addr: self.0.get() as u64,
        };
        // SAFETY: the memory is aligned to pages, as large as said, in a cell that nobody has a
        // reference into, and goes after the machine does (order of the fields of `Guest`; in `new`,
        // the guest does not run yet).
        unsafe { machine.set_user_memory_region(region) }
    }

    #[expect(unsafe_code, reason = "the guest may write there at any time")]
    fn words(&self, at: usize) -> [u64; 2] {
        let start = self.0.get().cast::<u64>();
        // SAFETY: both words are in the memory (`at` is the start of a page of it) and aligned; the
        // guest does not run while its owner can be borrowed here.
        [0, 1].map(|n| unsafe { start.add(at / 8 + n).read_volatile() })
    }
}

fn set_registers(processor: &VcpuFd, warm_up: u64, race: u64) -> Result<(), kvm_ioctls::Error> {
    let mut special = processor.get_sregs()?;
    set_mode(&mut special);
    processor.set_sregs(&special)?;
    processor.set_regs(&kvm_regs {
        rip: PROGRAM as u64,
        rflags: FLAGS,
        rcx: warm_up,
        rsi: race,
        rdi: DATA as u64,
        rax: BEFORE[0],
        rdx: BEFORE[1],
        rbx: AFTER,
        ..kvm_regs::default()
    })
}

/// Flat 64-bit mode.
fn set_mode(special: &mut kvm_sregs) {
    let data = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 0x10,
        // Data that was touched and may be written.
        type_: 3,
        present: 1,
        dpl: 0,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    };
    // Code that was touched and may be read, of 64 bits.
    special.cs = kvm_segment { selector: 0x8, type_: 11, db: 0, l: 1, ..data };
    for segment in
        [&mut special.ds, &mut special.es, &mut special.fs, &mut special.gs, &mut special.ss]
    {
        *segment = data;
    }
    (special.cr0, special.cr3, special.cr4) = (CR0, TABLES as u64, CR4);
    special.efer = EFER;
}

/// What `KVM_SET_SIGNAL_MASK` reads: a length and a set of so many bytes.
#[repr(C, packed)]
struct SignalMask {
    size: u32,
    set: u64,
}

/// `_IOW(KVMIO, 0x8b, u32)`, which kvm-ioctls lacks.
const KVM_SET_SIGNAL_MASK: libc::c_ulong = 1 << 30 | 4 << 16 | 0xae << 8 | 0x8b;

/// While the guest runs, and only then, [`STOP`] is not blocked. So it ends the run and stays pending:
/// no handler is called, and one that comes too early is not lost.
#[expect(unsafe_code, reason = "an ioctl without a wrapper")]
fn let_stop(processor: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mask = SignalMask { size: 8, set: !(1 << (STOP - 1)) };
    // SAFETY: the descriptor is a processor's, and the kernel only reads the mask, of the size it has.
    let done = unsafe { libc::ioctl(processor.as_raw_fd(), KVM_SET_SIGNAL_MASK, &raw const mask) };
    if done == 0 { Ok(()) } else { Err(kvm_ioctls::Error::last()) }
}

/// Why the device could not be opened.
fn unopened(errno: i32) -> Trouble {
    match errno {
        // The last two: a file without a driver behind it.
        libc::ENOENT | libc::ENODEV | libc::ENXIO => Trouble::Absent,
        libc::EACCES | libc::EPERM => Trouble::Denied,
        other => Trouble::Other(format!("it can't be opened: {}", text(other))),
    }
}

fn failed(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Trouble {
    move |error| Trouble::Other(format!("it could not {action}: {}", text(error.errno())))
}

fn text(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_a_driver_is_as_good_as_none() {
        for errno in [libc::ENOENT, libc::ENODEV, libc::ENXIO] {
            assert!(matches!(unopened(errno), Trouble::Absent), "{errno}");
        }
        for errno in [libc::EACCES, libc::EPERM] {
            assert!(matches!(unopened(errno), Trouble::Denied), "{errno}");
        }
        let Trouble::Other(reason) = unopened(libc::EMFILE) else { panic!("another class") };
        assert!(reason.contains("open files"), "{reason}");
    }
}
