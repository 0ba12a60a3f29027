//! Disks that Linux itself wrote, through an overlay.
//!
//! Everything is mounted in a namespace of the test's thread, which goes with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::thread::{UnshareFlags, unshare_unsafe};
use tempfile::TempDir;
use torpor_ext4::{Entry, Kind};

use crate::disk::{OURS, can_make_disks, check, contents, every_kind, format, read, run, truth};

/// A disk with an overlay on it, mounted.
struct Mounted {
    dir: TempDir,
    _disk_dir: TempDir,
    disk: PathBuf,
}

impl Mounted {
    /// `lower` fills what is below.
    fn new(lower: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["root", "root/upper", "root/work", "lower", "disk", "merged"] {
            fs::create_dir(at(name)).unwrap();
        }
        lower(&at("lower"));
        let (disk_dir, disk) = format(&at("root"), 128, &OURS);
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        run("mount", &["-text4", "-oloop,noatime", disk.to_str().unwrap(), &text(at("disk"))]);
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            text(at("lower")),
            text(at("disk/upper")),
            text(at("disk/work"))
        );
        run("mount", &["-toverlay", "overlay", "-o", &layers, &text(at("merged"))]);
        Self { dir, _disk_dir: disk_dir, disk }
    }

    fn merged(&self) -> PathBuf {
        self.dir.path().join("merged")
    }

    fn upper(&self) -> PathBuf {
        self.dir.path().join("disk/upper")
    }

    /// Compares what is read with what the kernel shows, as long as it shows it.
    fn check(&self) -> Vec<Entry> {
        run("sync", &["-f", self.upper().to_str().unwrap()]);
        let truth = truth(&self.upper());
        let contents = contents(&self.upper(), &truth);
        // As in a machine that rests: all is written, and mounted still.
        check(&read(File::open(&self.disk).unwrap()).unwrap(), &truth, &contents);
        run("umount", &[self.merged().to_str().unwrap()]);
        run("umount", &[self.dir.path().join("disk").to_str().unwrap()]);
        check(&read(File::open(&self.disk).unwrap()).unwrap(), &truth, &contents);
        run("e2fsck", &["-f", "-n", self.disk.to_str().unwrap()]);
        truth
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // After a test that failed: the directories can be removed only without them.
        for place in ["merged", "disk"] {
            let place = self.dir.path().join(place);
            let _ = std::process::Command::new("umount").arg("-lq").arg(place).output();
        }
    }
}

/// Runs `test` where its mounts are nobody else's.
fn apart(test: fn()) {
    if !can_make_disks() || !Path::new("/dev/loop-control").exists() {
        torpor_testkit::missing("there are no loop devices or no rights to use them");
        return;
    }
    let thread = std::thread::spawn(move || {
        // SAFETY: the thread has a mount namespace of its own from here on; no file descriptors are
        // touched, and nothing else runs in it.
        #[expect(unsafe_code, reason = "rustix marks unshare unsafe for what it does with FILES")]
        let unshared = unsafe { unshare_unsafe(UnshareFlags::NEWNS) };
        if unshared.is_err() {
            torpor_testkit::not_here("mount namespaces are not allowed here");
            return;
        }
        run("mount", &["--make-rprivate", "/"]);
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn kind_of<'e>(entries: &'e [Entry], path: &str) -> Option<&'e Kind> {
    entries.iter().find(|entry| entry.path == path.as_bytes()).map(|entry| &entry.kind)
}

#[test]
fn what_an_overlay_wrote_reads_as_the_kernel_shows_it() {
    apart(|| {
        let mounted = Mounted::new(|lower| {
            for dir in ["etc", "usr/bin", "usr/lib", "var/cache/old"] {
                fs::create_dir_all(lower.join(dir)).unwrap();
            }
            for file in ["etc/passwd", "etc/hosts", "usr/bin/ls", "usr/lib/libc", "var/cache/old/x"]
            {
                fs::write(lower.join(file), b"from the image").unwrap();
            }
        });
        let at = |name: &str| mounted.merged().join(name);
        fs::remove_file(at("etc/passwd")).unwrap();
        fs::remove_file(at("usr/bin/ls")).unwrap();
        fs::write(at("etc/hosts"), b"changed").unwrap();
        fs::rename(at("usr/lib/libc"), at("usr/lib/libc.so")).unwrap();
        fs::remove_dir_all(at("var/cache/old")).unwrap();
        fs::create_dir(at("var/cache/old")).unwrap();
        fs::write(at("var/cache/old/y"), b"new").unwrap();
        fs::remove_dir_all(at("usr/bin")).unwrap();
        fs::write(at("usr/bin"), b"a file now").unwrap();
        fs::create_dir(at("made")).unwrap();
        every_other_kind(&at("made"));
        let found = mounted.check();
        assert_eq!(kind_of(&found, "etc/passwd"), Some(&Kind::Removed));
        assert_eq!(kind_of(&found, "usr/lib/libc"), Some(&Kind::Removed));
        assert_eq!(kind_of(&found, "usr/bin"), Some(&Kind::File { size: 10 }));
        assert_eq!(kind_of(&found, "var/cache/old"), Some(&Kind::Directory { opaque: true }));
        assert_eq!(kind_of(&found, "var/cache/old/x"), None);
        assert_eq!(kind_of(&found, "etc"), Some(&Kind::Directory { opaque: false }));
    });
}

/// All that an overlay lets anybody make, its own marks not being part of it.
fn every_other_kind(dir: &Path) {
    let plain = tempfile::tempdir().unwrap();
    every_kind(plain.path());
    fs::remove_file(plain.path().join("removed")).unwrap();
    let (from, to) = (plain.path().to_str().unwrap(), dir.to_str().unwrap());
    // Without attributes: the overlay keeps those for itself.
    run("cp", &["-a", "--no-preserve=xattr", "--sparse=always", &format!("{from}/."), to]);
}

#[test]
fn what_linux_stores_in_its_own_ways_reads_as_it_shows_it() {
    apart(|| {
        let mounted = Mounted::new(|_| {});
        let upper = mounted.upper();
        every_kind(&upper);
        for name in ["symlink-60", "socket", "removed", "fifo"] {
            fs::hard_link(upper.join(name), upper.join(format!("{name}-again"))).unwrap();
        }
        fs::create_dir(upper.join("indexed")).unwrap();
        for number in 0..5000 {
            fs::write(upper.join(format!("indexed/a-name-that-is-long-{number}")), b"").unwrap();
        }
        for number in (0..5000).step_by(3) {
            fs::remove_file(upper.join(format!("indexed/a-name-that-is-long-{number}"))).unwrap();
        }
        in_odd_ways(&upper);
        let found = mounted.check();
        assert_eq!(kind_of(&found, "removed-again"), Some(&Kind::Removed));
        assert_eq!(kind_of(&found, "socket-again"), Some(&Kind::Socket));
        assert_eq!(kind_of(&found, "fifo-again"), Some(&Kind::HardLink { to: b"fifo".to_vec() }));
        let late = found.iter().find(|entry| entry.path == b"late").unwrap();
        assert_eq!(late.modified_at_ms, 6_000_000_000_987);
        let directory =
            run("debugfs", &["-R", "stat upper/indexed", mounted.disk.to_str().unwrap()]);
        assert!(directory.contains("Flags: 0x81000"), "it has an index: {directory}");
    });
}

/// Blocks that were set aside and not written, or are beyond the end; times far away.
fn in_odd_ways(upper: &Path) {
    let aside = File::create(upper.join("set-aside")).unwrap();
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&aside, flags, 0, 3 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&aside, b"middle", 1 << 20).unwrap();
    let beyond = File::create(upper.join("beyond")).unwrap();
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&beyond, flags, 0, 1 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&beyond, b"start", 0).unwrap();
    for (name, seconds) in [("old", -2_000_000_000), ("late", 6_000_000_000i64)] {
        let file = File::create(upper.join(name)).unwrap();
        let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: 987_654_321 };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        rustix::fs::futimens(&file, &times).unwrap();
    }
}
