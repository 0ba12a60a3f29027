//! What processor guests see: machines are revived only on what they were saved with.
//!
//! Guests that KVM runs see the host's, and may have seen what it can do: on one that can less they
//! would die of an unknown instruction, at any time after they were revived. So it is told by its name
//! and by a hash of what it can, and not by what changes on the same one: its number, its microcode,
//! which features its kernel uses.

use std::sync::OnceLock;

use crate::build::Accel;
use crate::line::cpu_model;

/// Names the processor that guests see.
pub fn processor(accel: Accel) -> &'static str {
    static HERE: OnceLock<String> = OnceLock::new();
    match accel {
        Accel::Tcg => cpu_model(accel),
        // Asked once: in a virtual machine each question is an exit from it.
        Accel::Kvm => HERE.get_or_init(|| format!("{} ({})", cpu_model(accel), here())),
    }
}

#[cfg(target_arch = "x86_64")]
fn here() -> String {
    let hash = blake3::hash(&features().map(u32::to_le_bytes).concat()).to_hex();
    let (name, hash) = (name(), &hash[..8]);
    if name.is_empty() { hash.to_owned() } else { format!("{name}, {hash}") }
}

#[cfg(not(target_arch = "x86_64"))]
fn here() -> String {
    std::env::consts::ARCH.to_owned()
}

/// Answers of the processor, by question and part of it.
#[cfg(target_arch = "x86_64")]
fn ask(leaf: u32, part: u32) -> [u32; 4] {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Beyond the last one it says anything.
    if leaf > __cpuid(leaf & 0x8000_0000).eax {
        return [0; 4];
    }
    let said = __cpuid_count(leaf, part);
    [said.eax, said.ebx, said.ecx, said.edx]
}

/// As its maker names it: `AMD EPYC 7763 64-Core Processor`.
#[cfg(target_arch = "x86_64")]
fn name() -> String {
    let bytes = [0x8000_0002, 0x8000_0003, 0x8000_0004]
        .iter()
        .flat_map(|leaf| ask(*leaf, 0))
        .flat_map(u32::to_le_bytes);
    let text = bytes.filter(|byte| byte.is_ascii_graphic() || *byte == b' ').map(char::from);
    text.collect::<String>().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Maker, family and model, and all that it can.
#[cfg(target_arch = "x86_64")]
fn features() -> [u32; 14] {
    /// Family and model, without the stepping.
    const MODEL: u32 = 0x0fff_3ff0;
    /// These two say what the kernel switched on.
    const OSXSAVE: u32 = 1 << 27;
    const OSPKE: u32 = 1 << 4;
    let [_, maker, maker_end, maker_middle] = ask(0, 0);
    let [model, _, basic, basic_more] = ask(1, 0);
    let [_, extended, extended_more, extended_most] = ask(7, 0);
    let [later, ..] = ask(7, 1);
    let [states, ..] = ask(0xd, 0);
    let [_, _, maker_own, maker_own_more] = ask(0x8000_0001, 0);
    let [_, maker_late, ..] = ask(0x8000_0008, 0);
    [
        maker,
        maker_middle,
        maker_end,
        model & MODEL,
        basic & !OSXSAVE,
        basic_more,
        extended,
        extended_more & !OSPKE,
        extended_most,
        later,
        states,
        maker_own,
        maker_own_more,
        maker_late,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_the_same_from_one_moment_and_core_to_the_next() {
        let first = here();
        let others: Vec<_> = (0..8).map(|_| std::thread::spawn(here)).collect();
        for other in others {
            assert_eq!(other.join().unwrap(), first);
        }
    }

    #[test]
    fn guests_of_kvm_see_the_hosts_and_others_one_that_is_the_same_everywhere() {
        let (kvm, emulated) = (processor(Accel::Kvm), processor(Accel::Tcg));
        assert!(kvm.starts_with("host (") && kvm.ends_with(&format!("{})", here())), "{kvm}");
        assert_eq!(emulated, cpu_model(Accel::Tcg));
    }
}
