//! The command line of QEMU.
//!
//! One profile: a machine is revived with the line that it was booted with, without the kernel and
//! with [`REVIVE`]. A device more or less, or in another place, and the saved state does not fit.
//! All paths are those [`inside`] its jail and never change; what is behind them does.

use serde::{Deserialize, Serialize};

use crate::build::Accel;

/// What QEMU sees in its jail, and the descriptors that it was started with.
pub mod inside {
    /// The image, never written.
    pub const ROOT: &str = "/root.img";
    /// What the guest writes.
    pub const DISK: &str = "/disk";
    /// The guest's memory as it was; mapped privately, never written.
    pub const MEMORY: &str = "/memory";
    pub const KERNEL: &str = "/vmlinux";
    pub const INITRAMFS: &str = "/initramfs";
    /// The only place where QEMU looks for firmware.
    pub const FIRMWARES: &str = "/firmware";
    /// The network card's other end; closed where there is none.
    pub const CARD_FD: i32 = 3;
    /// The listening end of the control socket.
    pub const MONITOR_FD: i32 = 4;
    /// The listening end of the agent's channel.
    pub const AGENT_FD: i32 = 5;
    /// KVM; closed where it is not used.
    pub const KVM_FD: i32 = 6;
    pub(crate) const LAST_FD: i32 = KVM_FD;
}

/// Translated code that an emulating QEMU keeps, in MiB: the default is a gigabyte for each machine,
/// and a busy guest fills what it gets.
const TRANSLATED_MIB: u32 = 32;

/// QEMU's name for the descriptor of KVM. The monitor lends others.
const KVM_SET: u32 = 2;

/// No new programs, no new rights, no old system calls.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// What reviving adds: begin with nothing running, wait for the state, which has no description of
/// the machine at its head as a migration has.
const REVIVE: [&str; 5] =
    ["-S", "-incoming", "defer", "-global", "migration.send-configuration=off"];

/// What the guest's kernel does at boot that costs a third of the time under emulation and serves
/// nothing here: certificates for signed modules, jitter entropy, tests of its own ciphers.
const NOT_AT_BOOT: &str = "cryptomgr.notests initcall_blacklist=load_system_certificate_list,\
                           bpf_tcp_ca_kfunc_init,jent_mod_init,bpf_dummy_struct_ops_init,\
                           crypto_kdf108_init,init_encrypted";

/// The last of the machine's eight places, where devices go that name none. In the first one a
/// disk never answers.
const AGENT_PLACE: u8 = 7;
const ROOT_PLACE: u8 = 6;
const DISK_PLACE: u8 = 5;
const CARD_PLACE: u8 = 4;

/// How a machine begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// From its kernel. `mtu` is what its card can send at once; `tick_khz` is
    /// [`Build::tick_khz`](crate::build::Build::tick_khz).
    Boot { mtu: u32, tick_khz: Option<u64> },
    /// From a saved state, in memory that is already as it was.
    Revive,
}

/// A network card whose other end is [`inside::CARD_FD`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    pub mac: [u8; 6],
}

/// Everything that the command line depends on. Two lines that differ in more than their origin are
/// two machines: the state of one can't be revived in the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub accel: Accel,
    /// The size of the memory file.
    pub memory_mib: u64,
    pub cpus: u32,
    pub card: Option<Card>,
    pub origin: Origin,
}

/// The processor that guests see, as QEMU names it.
pub fn cpu_model(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "host",
        // All that can be emulated but five levels of page tables: memory is never so large, and
        // every fault would walk one level more.
        Accel::Tcg => "max,la57=off",
    }
}

impl Line {
    pub fn arguments(&self) -> Vec<String> {
        let mut line = self.machine();
        line.extend(devices());
        if let Some(card) = self.card {
            line.extend(card.arguments());
        }
        match self.origin {
            Origin::Boot { mtu, tick_khz } => {
                line.extend(words(["-kernel", inside::KERNEL, "-initrd", inside::INITRAMFS]));
                line.extend(["-append".to_owned(), self.kernel_line(mtu, tick_khz)]);
            }
            Origin::Revive => line.extend(words(REVIVE)),
        }
        line
    }

    fn machine(&self) -> Vec<String> {
        let Self { memory_mib, cpus, accel, .. } = self;
        let accel = match accel {
            Accel::Kvm => format!("kvm,device=/dev/fdset/{KVM_SET}"),
            Accel::Tcg => format!("tcg,tb-size={TRANSLATED_MIB}"),
        };
        // Private, and opened for reading: neither the guest nor QEMU can change the file.
        let memory = format!(
            "memory-backend-file,id=memory,size={memory_mib}M,mem-path={},share=off,readonly=on,\
             rom=off,merge=off,dump=off",
            inside::MEMORY
        );
        let mut line = words(["-nodefaults", "-no-user-config", "-display", "none"]);
        line.extend(words(["-sandbox", SANDBOX, "-no-reboot"]));
        // What is not used: a serial port, and programs for other firmware.
        let machine = "microvm,memory-backend=memory,isa-serial=off,x-option-roms=off";
        line.extend(words(["-machine", machine]));
        // The firmware that the machine would take by itself hangs with such kernels.
        line.extend(words(["-L", inside::FIRMWARES, "-bios", "qboot.rom"]));
        if self.accel == Accel::Kvm {
            line.extend(["-add-fd".to_owned(), format!("fd={},set={KVM_SET}", inside::KVM_FD)]);
        }
        line.extend(["-accel".to_owned(), accel]);
        line.extend(words(["-cpu", cpu_model(self.accel)]));
        line.extend([
            "-smp".to_owned(),
            cpus.to_string(),
            "-m".to_owned(),
            format!("{memory_mib}M"),
        ]);
        line.extend(["-object".to_owned(), memory]);
        line
    }

    /// Says nothing on a console, because there is none; a panic is a reboot, and a reboot the end.
    /// Time that jumps because the machine was frozen is not worth a complaint.
    fn kernel_line(&self, mtu: u32, tick_khz: Option<u64>) -> String {
        let mut line = format!(
            "quiet reboot=t panic=-1 nowatchdog rcupdate.rcu_cpu_stall_suppress=1 \
             random.trust_cpu=on {NOT_AT_BOOT} torpor.mtu={mtu}"
        );
        // With KVM the guest has a clock that needs no measuring.
        if let (Accel::Tcg, Some(khz)) = (self.accel, tick_khz) {
            line += &format!(" tsc_early_khz={khz} tsc=reliable no_timer_check");
        }
        line
    }
}

impl Card {
    fn arguments(self) -> Vec<String> {
        let mac = self.mac.map(|byte| format!("{byte:02x}")).join(":");
        vec![
            "-netdev".to_owned(),
            format!("tap,id=network,fd={}", inside::CARD_FD),
            "-device".to_owned(),
            format!("virtio-net-device,netdev=network,mac={mac},bus=virtio-mmio-bus.{CARD_PLACE}"),
        ]
    }
}

/// Each in a place of its own, so that the card's absence moves nothing. Kernels find what is in the
/// last place first: that makes the agent's port `vport0p1`, the image `vda` and the disk `vdb`.
fn devices() -> Vec<String> {
    let socket = |id, fd| format!("socket,id={id},fd={fd},server=on,wait=off");
    let file = |id: &str, path: &str, more: &str| {
        format!("driver=raw,node-name={id},file.driver=file,file.filename={path},{more}")
    };
    // Images are shared by machines and never written.
    let root = file("root", inside::ROOT, "read-only=on,file.read-only=on,file.locking=off");
    // What the guest syncs is not synced on the host: a machine that the host loses is brought back
    // from its last save, never from this file. Locked, so that no second QEMU writes to it.
    let disk = file(
        "disk",
        inside::DISK,
        "discard=unmap,detect-zeroes=unmap,cache.no-flush=on,file.discard=unmap,\
         file.cache.no-flush=on,file.locking=on",
    );
    // By default a QEMU stops its guest when the host has no room, and nobody would let it go on.
    let block = |id, place| {
        format!(
            "virtio-blk-device,drive={id},serial={id},werror=report,rerror=report,\
             bus=virtio-mmio-bus.{place}"
        )
    };
    let ports = format!("virtio-serial-device,max_ports=2,bus=virtio-mmio-bus.{AGENT_PLACE}");
    [
        ("-chardev", socket("monitor", inside::MONITOR_FD)),
        ("-mon", "chardev=monitor,mode=control".to_owned()),
        ("-chardev", socket("agent", inside::AGENT_FD)),
        ("-device", ports),
        ("-device", "virtserialport,chardev=agent,name=agent".to_owned()),
        ("-blockdev", root),
        ("-device", block("root", ROOT_PLACE)),
        ("-blockdev", disk),
        ("-device", block("disk", DISK_PLACE)),
    ]
    .into_iter()
    .flat_map(|(option, value)| [option.to_owned(), value])
    .collect()
}

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: Origin = Origin::Boot { mtu: 1400, tick_khz: Some(2_500_000) };

    fn line(accel: Accel, origin: Origin) -> Vec<String> {
        let card = Some(Card { mac: [2, 0, 0, 0, 0, 0x1f] });
        Line { accel, memory_mib: 512, cpus: 2, card, origin }.arguments()
    }

    /// What follows `option`, each time.
    fn values<'a>(line: &'a [String], option: &str) -> Vec<&'a str> {
        let follows = |pair: &'a [String]| (pair[0] == option).then_some(pair[1].as_str());
        line.windows(2).filter_map(follows).collect()
    }

    #[test]
    fn a_machine_is_revived_with_its_boot_line_without_the_kernel_and_three_options_more() {
        for accel in [Accel::Kvm, Accel::Tcg] {
            let mut expected = line(accel, BOOT);
            for option in ["-kernel", "-initrd", "-append"] {
                let at = expected.iter().position(|word| word == option).unwrap();
                expected.drain(at..at + 2);
            }
            expected.extend(words(["-S", "-incoming", "defer", "-global"]));
            expected.extend(words(["migration.send-configuration=off"]));
            assert_eq!(line(accel, Origin::Revive), expected);
        }
    }

    #[test]
    fn the_firmware_is_the_one_that_boots() {
        for origin in [BOOT, Origin::Revive] {
            let line = line(Accel::Tcg, origin);
            assert_eq!(values(&line, "-bios"), ["qboot.rom"]);
            assert_eq!(values(&line, "-L"), [inside::FIRMWARES]);
        }
    }

    #[test]
    fn there_is_no_console_no_default_device_and_acpi_stays() {
        let line = line(Accel::Tcg, BOOT);
        for option in ["-nodefaults", "-no-user-config", "-no-reboot"] {
            assert!(line.iter().any(|word| word == option), "{option}");
        }
        assert_eq!(values(&line, "-display"), ["none"]);
        let all = line.join(" ");
        for never in ["acpi=off", "console=", " -serial", " -monitor", "isa-serial=on", "vhost"] {
            assert!(!all.contains(never), "{never}");
        }
    }

    #[test]
    fn the_guest_finds_agent_image_and_disk_in_this_order() {
        let line = line(Accel::Tcg, BOOT);
        let place = |part: &str| -> u8 {
            let devices = values(&line, "-device");
            let device = devices.into_iter().find(|device| device.starts_with(part)).unwrap();
            device.rsplit_once("virtio-mmio-bus.").unwrap().1.parse().unwrap()
        };
        let order =
            ["virtio-serial", "virtio-blk-device,drive=root,", "virtio-blk-device,drive=disk,"];
        let mut places = order.map(place).to_vec();
        places.push(place("virtio-net"));
        assert!(places.is_sorted_by(|one, next| one > next), "{places:?}");
        assert!(!places.contains(&0), "a disk in the first place never answers");
    }

    #[test]
    fn a_guest_is_told_of_a_full_host_and_not_stopped() {
        let line = line(Accel::Tcg, BOOT);
        let disks = values(&line, "-device").into_iter().filter(|it| it.starts_with("virtio-blk"));
        let told = |disk: &str| disk.contains("werror=report") && disk.contains("rerror=report");
        assert_eq!(disks.filter(|disk| told(disk)).count(), 2);
    }

    #[test]
    fn kvm_is_used_through_a_descriptor() {
        let native = line(Accel::Kvm, Origin::Revive);
        assert_eq!(values(&native, "-add-fd"), ["fd=6,set=2"]);
        assert_eq!(values(&native, "-accel"), ["kvm,device=/dev/fdset/2"]);
        let emulated = line(Accel::Tcg, Origin::Revive);
        assert!(values(&emulated, "-add-fd").is_empty());
        assert_eq!(values(&emulated, "-accel"), ["tcg,tb-size=32"]);
    }

    #[test]
    fn guests_have_ipv6() {
        assert!(!line(Accel::Tcg, BOOT).join(" ").contains("inet6_init"));
    }

    #[test]
    fn only_an_emulated_guest_is_told_how_fast_the_counter_ticks() {
        let emulated = line(Accel::Tcg, BOOT);
        let append = values(&emulated, "-append")[0];
        assert!(append.contains("tsc_early_khz=2500000 tsc=reliable no_timer_check"), "{append}");
        assert!(append.contains("torpor.mtu=1400"), "{append}");
        let native = line(Accel::Kvm, BOOT);
        assert!(!values(&native, "-append")[0].contains("tsc"));
        assert_eq!(values(&native, "-cpu"), ["host"]);
        assert_eq!(values(&emulated, "-cpu"), ["max,la57=off"]);
    }

    #[test]
    fn memory_is_private_and_its_file_only_read() {
        let line = line(Accel::Kvm, Origin::Revive);
        let memory = values(&line, "-object")[0];
        for part in ["share=off", "readonly=on", "rom=off", "size=512M", "mem-path=/memory"] {
            assert!(memory.split(',').any(|word| word == part), "{part}");
        }
    }

    #[test]
    fn a_machine_without_a_card_has_its_other_devices_where_they_always_are() {
        let with = line(Accel::Tcg, BOOT);
        let without =
            Line { accel: Accel::Tcg, memory_mib: 512, cpus: 2, card: None, origin: BOOT };
        let without = without.arguments();
        assert!(values(&with, "-device")[4].contains("mac=02:00:00:00:00:1f,"));
        assert_eq!(values(&without, "-device"), values(&with, "-device")[..4]);
        assert!(values(&without, "-netdev").is_empty());
    }
}
