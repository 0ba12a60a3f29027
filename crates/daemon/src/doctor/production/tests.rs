//! Hosts made of files, good and bad.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use tempfile::TempDir;
use torpor_engines::probe::Verdict;

use super::*;

const CPU: &str = "/sys/devices/system/cpu";
const SWAPS: &str = "Filename\tType\tSize\tUsed\tPriority\n";

/// A host with nothing to complain about.
struct Good {
    _dir: TempDir,
    host: Host,
    config: Config,
}

impl Good {
    fn host() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let owner = fs::metadata(dir.path()).unwrap().uid();
        let host = Host { root: dir.path().to_owned(), owner };
        let good = Self { _dir: dir, host, config: Config::default() };
        good.write(&format!("{CPU}/vulnerabilities/meltdown"), "Not affected\n");
        let mds = "Mitigation: Clear CPU buffers; SMT vulnerable\n";
        good.write(&format!("{CPU}/vulnerabilities/mds"), mds);
        good.write(&format!("{CPU}/smt/active"), "0\n");
        good.write("/proc/swaps", SWAPS);
        good.write("/sys/kernel/mm/ksm/run", "0\n");
        good.write("/proc/sys/kernel/kptr_restrict", "1\n");
        good.write("/proc/sys/kernel/core_pattern", "|/usr/lib/systemd/systemd-coredump %P\n");
        for key in ["secret.key", "egress-authority.key"] {
            good.private(&format!("/var/lib/torpor/{key}"), 0o600);
        }
        good.private("/var/lib/torpor", 0o700);
        good.write("/run/torpor/0123abcd/keeper.sock", "");
        good.write("/etc/torpor/torpor.toml", "listen = '127.0.0.1:8900'\n");
        good
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.host.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Gives a path this mode, and makes a file if nothing is there.
    fn private(&self, path: &str, mode: u32) {
        if !self.host.at(path).exists() {
            self.write(path, "");
        }
        fs::set_permissions(self.host.at(path), PermissionsExt::from_mode(mode)).unwrap();
    }

    fn process(&self, pid: u32, parent: u32, command: &[&str], cores: &str) {
        self.write(&format!("/proc/{pid}/stat"), &format!("{pid} (a) b) S {parent} 1 1 0\n"));
        self.write(&format!("/proc/{pid}/cmdline"), &command.join("\0"));
        let limits = format!("Limit  Soft  Hard  Units\nMax core file size  {cores}  1  bytes\n");
        self.write(&format!("/proc/{pid}/limits"), &limits);
    }

    fn cores(&self, daemon: Option<u32>) -> Finding {
        self.host.cores(daemon, &self.config.runtime_dir)
    }

    fn permissions(&self) -> Finding {
        self.host.permissions(&self.config, Path::new(DEFAULT_FILE))
    }

    fn verdict(&self, name: &str) -> Verdict {
        let findings = self.host.findings();
        let finding = findings.iter().find(|finding| finding.name == name).unwrap();
        assert_eq!(finding.remedy.is_none(), finding.verdict == Verdict::Ok, "{finding:?}");
        finding.verdict
    }

    fn swap(&self, area: &str) -> Verdict {
        self.write("/proc/swaps", &format!("{SWAPS}{area} partition 1 0 -2\n"));
        self.verdict("swap encryption")
    }
}

#[test]
fn a_good_host_has_nothing_to_complain_about() {
    let good = Good::host();
    let mut findings = good.host.findings();
    findings.extend([good.cores(None), good.permissions()]);
    for finding in findings {
        assert_eq!(finding.verdict, Verdict::Ok, "{finding:?}");
    }
}

#[test]
fn a_flaw_of_the_processor_that_is_open_is_a_failure_and_one_that_is_not_known_a_warning() {
    let good = Good::host();
    let at = format!("{CPU}/vulnerabilities/spectre_v2");
    for (text, verdict) in [
        ("Vulnerable: Clear CPU buffers attempted, no microcode\n", Verdict::Fail),
        ("Mitigation: Retpolines; BHI: Vulnerable\n", Verdict::Fail),
        ("KVM: Vulnerable\n", Verdict::Fail),
        ("Unknown: Dependent on hypervisor status\n", Verdict::Warn),
        ("Mitigation: Enhanced IBRS\n", Verdict::Ok),
    ] {
        good.write(&at, text);
        assert_eq!(good.verdict("CPU mitigations"), verdict, "{text}");
    }
    fs::remove_dir_all(good.host.at(format!("{CPU}/vulnerabilities"))).unwrap();
    assert_eq!(good.verdict("CPU mitigations"), Verdict::Warn, "a kernel that tells nothing");
}

#[test]
fn shared_cores_are_a_warning_and_merged_memory_is_a_failure() {
    let good = Good::host();
    good.write(&format!("{CPU}/smt/active"), "1\n");
    assert_eq!(good.verdict("SMT"), Verdict::Warn);
    good.write("/sys/kernel/mm/ksm/run", "1\n");
    assert_eq!(good.verdict("KSM"), Verdict::Fail);
}

#[test]
fn a_kernel_that_tells_too_much_is_a_warning_that_names_the_settings() {
    let good = Good::host();
    good.write("/proc/sys/kernel/kptr_restrict", "0\n");
    good.write("/proc/sys/kernel/unprivileged_userns_clone", "1\n");
    assert_eq!(good.verdict("kernel settings"), Verdict::Warn);
    let remedy = good.host.findings().pop().unwrap().remedy.unwrap();
    for setting in ["kernel.kptr_restrict=1", "kernel.unprivileged_userns_clone=0"] {
        assert!(remedy.contains(setting), "{remedy}");
    }
}

#[test]
fn swap_is_fine_in_memory_or_encrypted_all_the_way_down() {
    let good = Good::host();
    assert_eq!(good.swap("/dev/sda2"), Verdict::Fail);
    assert_eq!(good.swap("/dev/zram0"), Verdict::Ok);
    good.write("/sys/block/zram0/backing_dev", "/dev/sda3\n");
    assert_eq!(good.swap("/dev/zram0"), Verdict::Fail, "what is cold goes to a plain disk");
    good.write("/sys/block/dm-0/dm/uuid", "CRYPT-LUKS2-0123-luks\n");
    good.write("/sys/block/dm-1/dm/uuid", "LVM-0123\n");
    assert_eq!(good.swap("/dev/dm-0"), Verdict::Ok);
    assert_eq!(good.swap("/dev/dm-1"), Verdict::Fail);
    // A volume on an encrypted one, by its name.
    fs::create_dir_all(good.host.at("/sys/block/dm-1/slaves/dm-0")).unwrap();
    fs::create_dir_all(good.host.at("/dev/mapper")).unwrap();
    symlink("../dm-1", good.host.at("/dev/mapper/vg-swap")).unwrap();
    assert_eq!(good.swap("/dev/mapper/vg-swap"), Verdict::Ok);
    fs::create_dir_all(good.host.at("/sys/block/dm-1/slaves/sdb1")).unwrap();
    assert_eq!(good.swap("/dev/dm-1"), Verdict::Fail, "half of it is on a plain disk");
}

#[test]
fn a_swap_file_is_as_good_as_the_disk_below_it() {
    let good = Good::host();
    good.write("/sys/block/dm-0/dm/uuid", "CRYPT-LUKS2-0123-luks\n");
    good.write(
        "/proc/self/mountinfo",
        "21 1 8:2 / / rw - ext4 /dev/sda2 rw\n22 21 253:0 / /srv rw - ext4 /dev/dm-0 rw\n",
    );
    fs::create_dir_all(good.host.at("/sys/dev/block")).unwrap();
    symlink("../../devices/sda/sda2", good.host.at("/sys/dev/block/8:2")).unwrap();
    symlink("../../devices/virtual/block/dm-0", good.host.at("/sys/dev/block/253:0")).unwrap();
    assert_eq!(good.swap("/srv/swapfile"), Verdict::Ok);
    assert_eq!(good.swap("/swapfile"), Verdict::Fail);
}

#[test]
fn the_daemon_the_keeper_and_machines_must_leave_no_core_files_wherever_they_would_go() {
    let good = Good::host();
    let keeper = ["torpor", "keeper", "/run/torpor/0123abcd/keeper.sock"];
    good.process(10, 1, &["torpor", "serve"], "1");
    good.process(20, 1, &keeper, "1");
    good.process(30, 20, &["runsc", "boot"], "1");
    good.process(31, 30, &["exe"], "1");
    good.process(40, 1, &["bash", "keeper"], "unlimited");
    let fine = good.cores(Some(10));
    assert_eq!(fine.verdict, Verdict::Ok, "{fine:?}");
    assert!(fine.detail.contains('4'), "{fine:?}");
    good.process(31, 30, &["exe"], "0");
    let piped = good.cores(Some(10));
    assert_eq!(piped.verdict, Verdict::Fail, "0 does not hold for a pipe: {piped:?}");
    assert!(piped.detail.ends_with("processes 31"), "{piped:?}");
    good.write("/proc/sys/kernel/core_pattern", "core\n");
    assert_eq!(good.cores(Some(10)).verdict, Verdict::Ok);
    good.process(10, 1, &["torpor", "serve"], "unlimited");
    assert_eq!(good.cores(Some(10)).verdict, Verdict::Fail);
    good.process(10, 1, &["torpor", "serve"], "1");
    good.write("/proc/sys/kernel/core_pattern", "@/run/cores.sock\n");
    assert_eq!(good.cores(Some(10)).verdict, Verdict::Warn);
}

#[test]
fn what_others_may_read_or_replace_is_a_failure_with_the_name_of_the_file() {
    for (path, mode, well) in [
        ("/var/lib/torpor", 0o755, 0o700),
        ("/var/lib/torpor", 0o1777, 0o700),
        ("/var/lib/torpor/secret.key", 0o640, 0o600),
        ("/var/lib/torpor/egress-authority.key", 0o604, 0o600),
        ("/var/lib", 0o777, 0o755),
        ("/run/torpor", 0o775, 0o755),
        ("/run/torpor/0123abcd", 0o777, 0o700),
        ("/etc/torpor/torpor.toml", 0o664, 0o644),
    ] {
        let good = Good::host();
        good.private(path, mode);
        let bad = good.permissions();
        assert_eq!(bad.verdict, Verdict::Fail, "{path} {mode:o}");
        assert!(bad.detail.starts_with(&format!("{path} can ")), "{bad:?}");
        good.private(path, well);
        assert_eq!(good.permissions().verdict, Verdict::Ok, "{path}");
    }
}

#[test]
fn a_configuration_with_a_secret_is_nobody_elses_and_directories_like_tmp_are_fine() {
    let mut good = Good::host();
    good.write("/etc/torpor/torpor.toml", "  api_key = 'sixteen characters'\n");
    good.private("/etc/torpor/torpor.toml", 0o644);
    assert_eq!(good.permissions().verdict, Verdict::Fail);
    good.private("/etc/torpor/torpor.toml", 0o600);
    good.private("/run", 0o1777);
    assert_eq!(good.permissions().verdict, Verdict::Ok);
    good.host.owner += 1;
    let foreign = good.permissions();
    let root = fs::metadata(&good.host.root).unwrap().uid() == 0;
    assert_eq!(foreign.verdict == Verdict::Fail, !root, "root may own everything: {foreign:?}");
}

#[test]
fn an_address_of_others_without_tls_is_a_failure_and_beside_tls_a_warning() {
    let at = |listen: &str, also: Option<&str>, tls: Option<&str>| {
        let mut config = Config { listen: listen.parse().unwrap(), ..Config::default() };
        config.listen_also = also.map(|text| text.to_owned().try_into().unwrap());
        config.tls.listen = tls.map(|text| text.parse().unwrap());
        listeners(&config).verdict
    };
    let public = "0.0.0.0:80";
    assert_eq!(at("127.0.0.1:8900", None, None), Verdict::Ok);
    assert_eq!(at("127.0.0.1:8900", None, Some("0.0.0.0:443")), Verdict::Ok);
    assert_eq!(at(public, None, None), Verdict::Fail);
    assert_eq!(at("127.0.0.1:8900", Some(public), None), Verdict::Fail);
    assert_eq!(at("127.0.0.1:8900", Some(public), Some("0.0.0.0:443")), Verdict::Warn);
}

#[tokio::test]
async fn an_api_without_a_key_is_a_failure_whether_the_daemon_runs_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let listen = "127.0.0.1:0".parse().unwrap();
    let config = Config { listen, data_dir: dir.path().join("data"), ..Config::default() };
    assert_eq!(guarded(&config).await, Some(false));
    assert!(!config.data_dir.exists(), "looking must not make it");
    let layout = Layout::open(&config.data_dir).unwrap();
    assert_eq!(guarded(&config).await, None, "somebody has it who does not answer");
    let ledger = Ledger::open(&layout).await.unwrap();
    ledger.create_key("a").await.unwrap();
    ledger.close().await;
    drop(layout);
    assert_eq!(guarded(&config).await, Some(true));
    assert_eq!(keys(Some(false)).verdict, Verdict::Fail);
    assert_eq!(keys(None).verdict, Verdict::Warn);
}

#[tokio::test]
async fn a_build_with_known_holes_and_an_emulated_processor_are_no_walls() {
    let dir = tempfile::tempdir().unwrap();
    let verdict = async |version: &str| {
        let runsc = dir.path().join("runsc");
        fs::write(&runsc, format!("#!/bin/sh\necho runsc version {version}\n")).unwrap();
        fs::set_permissions(&runsc, PermissionsExt::from_mode(0o755)).unwrap();
        isolation(Wall::Gvisor(Build::of(&runsc).await.unwrap())).verdict
    };
    assert_eq!(verdict("0.0~20240729.0").await, Verdict::Fail);
    assert_eq!(verdict("release-20260817.0").await, Verdict::Warn);
    assert_eq!(verdict("release-20260901.0").await, Verdict::Ok);
    assert_eq!(isolation(Wall::Kvm).verdict, Verdict::Ok);
    assert_eq!(isolation(Wall::Emulation).verdict, Verdict::Fail);
    assert_eq!(isolation(Wall::None).verdict, Verdict::Fail);
}
