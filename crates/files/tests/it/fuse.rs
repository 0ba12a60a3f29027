//! What programs do with files, on a mount that an agent serves.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::process::Command;

use rustix::fs::FlockOperation;
use torpor_protocol::guest::{FailureCode, Reply, Request};

use crate::machine::{Machine, Server, World, eventually, files};
use crate::world::{Disk, run};

#[test]
fn files_are_made_linked_renamed_and_removed() {
    let Some(world) = World::new(32) else { return };
    let at = |name: &str| world.path(name);
    fs::create_dir_all(at("a/b")).unwrap();
    fs::write(at("a/file"), "content").unwrap();
    fs::hard_link(at("a/file"), at("a/b/hard")).unwrap();
    let stat = fs::metadata(at("a/b/hard")).unwrap();
    assert_eq!((stat.nlink(), stat.ino()), (2, fs::metadata(at("a/file")).unwrap().ino()));
    symlink("../a/file", at("a/soft")).unwrap();
    assert_eq!(fs::read_to_string(at("a/soft")).unwrap(), "content");
    let exclusive = OpenOptions::new().write(true).create_new(true).open(at("a/file"));
    assert_eq!(exclusive.unwrap_err().kind(), ErrorKind::AlreadyExists);
    fs::set_permissions(at("a/file"), fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(at("a/file"), Some(1000), Some(1001)).unwrap();
    let stat = fs::metadata(world.host("a/file")).unwrap();
    assert_eq!((stat.mode() & 0o7777, stat.uid(), stat.gid()), (0o640, 1000, 1001));
    fs::write(at("a/other"), "other").unwrap();
    fs::rename(at("a/other"), at("a/file")).unwrap();
    assert_eq!(fs::read_to_string(at("a/file")).unwrap(), "other");
    assert_eq!(fs::read_to_string(at("a/b/hard")).unwrap(), "content");
    assert_eq!(fs::remove_dir(at("a")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    fs::remove_dir_all(at("a")).unwrap();
    assert!(!world.host("a").exists());
    let device = run(Command::new("sh")
        .args(["-c", "! mknod \"$1\" c 1 3 2>/dev/null", "sh"])
        .arg(at("null")));
    assert_eq!(device, "", "no device can be made");
    let space = rustix::fs::statvfs(at("")).unwrap();
    assert_eq!(space.f_blocks, rustix::fs::statvfs(world.host("")).unwrap().f_blocks);
}

#[test]
fn content_is_what_was_written_with_holes_and_all() {
    let Some(world) = World::new(64) else { return };
    let path = world.path("big");
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
    let mut file = file.unwrap();
    let data: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    file.write_all(&data).unwrap();
    file.write_all_at(b"far", 5 << 30).unwrap();
    assert_eq!(fs::metadata(world.host("big")).unwrap().len(), (5 << 30) + 3);
    assert!(fs::metadata(&path).unwrap().blocks() < 16 << 10, "it has a hole");
    let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap();
    assert!((3_000_000..3_100_000).contains(&hole), "{hole}");
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut read = vec![0; data.len()];
    file.read_exact(&mut read).unwrap();
    assert!(read == data);
    file.set_len(1_000_001).unwrap();
    assert_eq!(fs::read(world.host("big")).unwrap(), &data[..1_000_001]);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 2_000_000).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 2_000_000);
    file.sync_all().unwrap();
    drop(OpenOptions::new().write(true).truncate(true).open(&path).unwrap());
    assert_eq!(fs::metadata(world.host("big")).unwrap().len(), 0);
    let copy = world.path("copy");
    fs::write(&path, &data).unwrap();
    fs::copy(&path, &copy).unwrap();
    assert!(fs::read(world.host("copy")).unwrap() == data);
}

#[test]
fn a_file_that_is_open_can_be_removed_and_replaced() {
    let Some(world) = World::new(32) else { return };
    for replaced in [false, true] {
        let path = world.path("open");
        let mut file =
            OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        file.write_all(b"first").unwrap();
        if replaced {
            fs::write(world.path("new"), "new").unwrap();
            fs::rename(world.path("new"), &path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        } else {
            fs::remove_file(&path).unwrap();
            assert!(!path.exists());
        }
        file.write_all(b" second").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "first second");
        assert!(
            !fs::read_dir(world.path(""))
                .unwrap()
                .flatten()
                .any(|entry| { entry.file_name().to_string_lossy().starts_with(".torpor") })
        );
        drop(file);
        eventually("it is gone", || {
            let hidden = fs::read_dir(world.host(".torpor-removed")).unwrap();
            (hidden.count() == 0).then_some(())
        });
        let _ = fs::remove_file(&path);
    }
}

#[test]
fn a_directory_of_thousands_is_listed_whole() {
    let Some(world) = World::new(64) else { return };
    fs::create_dir(world.host("many")).unwrap();
    for number in 0..5000 {
        fs::write(world.host(&format!("many/{number:04}")), "").unwrap();
    }
    let mut names: Vec<_> = fs::read_dir(world.path("many"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 5000);
    assert!(names.iter().enumerate().all(|(number, name)| *name == format!("{number:04}")));
    let listed = run(Command::new("ls").arg("-la").arg(world.path("many")));
    assert_eq!(listed.lines().count(), 5003, "with its dots");
}

#[test]
fn programs_are_executed_and_files_mapped() {
    let Some(world) = World::new(64) else { return };
    fs::copy("/bin/ls", world.path("ls")).unwrap();
    let listed = run(Command::new(world.path("ls")).arg(world.path("")));
    assert!(listed.contains("ls\n"), "{listed}");
    // Shared, private and read-only mappings.
    let script = "import mmap,sys\nf=open(sys.argv[1],'r+b')\nm=mmap.mmap(f.fileno(),0)\n\
        m[0:5]=b'HELLO'\nm.flush()\nm.close()\n";
    fs::write(world.path("mapped"), vec![b'x'; 10_000]).unwrap();
    run(Command::new("python3").args(["-c", script]).arg(world.path("mapped")));
    assert!(fs::read(world.host("mapped")).unwrap().starts_with(b"HELLOxxx"));
}

#[test]
fn a_database_and_a_repository_live_on_it() {
    let Some(world) = World::new(128) else { return };
    let database = world.path("db");
    let sqlite = |statements: &str| run(Command::new("sqlite3").arg(&database).arg(statements));
    sqlite("PRAGMA journal_mode=WAL; CREATE TABLE t(x); INSERT INTO t VALUES (1),(2);");
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let mut command = Command::new("sqlite3");
            let loops = "INSERT INTO t VALUES (3);".repeat(20);
            command.arg("-cmd").arg(".timeout 20000").arg(&database).arg(loops).spawn().unwrap()
        })
        .collect();
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    assert_eq!(sqlite("SELECT count(*) FROM t; PRAGMA integrity_check;"), "82\nok\n");
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.args(["-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]);
        command.arg("-C").arg(world.path("")).args(arguments);
        run(&mut command)
    };
    git(&["init", "-q", "one"]);
    for number in 0..50 {
        fs::write(world.path(&format!("one/{number}")), format!("{number}\n").repeat(500)).unwrap();
    }
    git(&["-C", "one", "add", "."]);
    git(&["-C", "one", "commit", "-qm", "all"]);
    git(&["clone", "-q", "one", "two"]);
    assert_eq!(git(&["-C", "two", "status", "--short"]), "");
    git(&["-C", "two", "fsck", "--strict"]);
}

#[test]
fn locks_exclude_between_two_mounts_and_whoever_waits_gets_them() {
    let Some(disk) = Disk::new(32) else { return };
    let volume = disk.volume();
    let (mut one, mut two) = (Machine::new(), Machine::new());
    let _one = one.mount(files(&disk, 1, "one"), &Server::new(&volume, false));
    let _two = two.mount(files(&disk, 1, "two"), &Server::new(&volume, false));
    let open = |mount: &str| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.open(disk.beside(mount).join("lock")).unwrap()
    };
    let (first, second) = (open("one"), open("two"));
    rustix::fs::flock(&first, FlockOperation::LockExclusive).unwrap();
    let try_second = || rustix::fs::flock(&second, FlockOperation::NonBlockingLockShared);
    assert_eq!(try_second(), Err(rustix::io::Errno::AGAIN));
    let waiter = std::thread::spawn(move || {
        rustix::fs::flock(&second, FlockOperation::LockExclusive).unwrap();
        second
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!waiter.is_finished());
    // Closing it gives it back.
    drop(first);
    let second = waiter.join().unwrap();
    // The other kind, of processes.
    let script = "import fcntl,sys\nf=open(sys.argv[1],'r+')\n\
        fcntl.lockf(f,fcntl.LOCK_EX|fcntl.LOCK_NB,10,5)\nprint('locked')\nsys.stdout.flush()\nsys.stdin.read()\n";
    let mut holder = Command::new("python3")
        .args(["-c", script])
        .arg(disk.beside("one").join("lock"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 7];
    holder.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let other = |mount: &str, wait: &str| {
        let script = format!(
            "import fcntl,sys\nf=open(sys.argv[1],'r+')\nfcntl.lockf(f,fcntl.LOCK_EX{wait},1,7)\n"
        );
        let mut command = Command::new("python3");
        command.args(["-c", &script]).arg(disk.beside(mount).join("lock"));
        command.stderr(std::process::Stdio::null());
        command
    };
    for mount in ["one", "two"] {
        assert!(!other(mount, "|fcntl.LOCK_NB").status().unwrap().success());
    }
    let mut waiting = other("two", "").spawn().unwrap();
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success() && waiting.wait().unwrap().success());
    drop(second);
}

#[test]
fn lines_of_many_writers_on_two_mounts_are_whole() {
    let Some(disk) = Disk::new(32) else { return };
    let volume = disk.volume();
    let (mut one, mut two) = (Machine::new(), Machine::new());
    let mount =
        |name| torpor_lifecycle::guest::FilesMount { shared: true, ..files(&disk, 1, name) };
    let _one = one.mount(mount("one"), &Server::new(&volume, false));
    let _two = two.mount(mount("two"), &Server::new(&volume, false));
    std::thread::scope(|scope| {
        for writer in 0..10 {
            let path = disk.beside(["one", "two"][writer % 2]).join("log");
            scope.spawn(move || {
                let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
                for number in 0..100 {
                    let line = format!("{writer} {number} {}\n", "x".repeat(number));
                    file.write_all(line.as_bytes()).unwrap();
                }
            });
        }
    });
    for mount in ["one", "two"] {
        let log = fs::read_to_string(disk.beside(mount).join("log")).unwrap();
        assert_eq!(log.lines().count(), 1000, "{mount}");
        for line in log.lines() {
            let words: Vec<_> = line.split(' ').collect();
            assert_eq!(words[2].len(), words[1].parse::<usize>().unwrap(), "{line}");
        }
    }
    // What one changes the other sees at once.
    for number in 0..50 {
        fs::write(disk.beside("one").join("seen"), format!("{number}")).unwrap();
        let seen = fs::read_to_string(disk.beside("two").join("seen")).unwrap();
        assert_eq!(seen, format!("{number}"));
        fs::rename(disk.beside("two").join("seen"), disk.beside("two").join("moved")).unwrap();
        assert!(
            !disk.beside("one").join("seen").exists() && disk.beside("one").join("moved").exists()
        );
    }
}

#[test]
fn a_read_only_mount_is_one() {
    let Some(disk) = Disk::new(32) else { return };
    fs::write(disk.path().join("file"), "content").unwrap();
    let mut machine = Machine::new();
    let mount = torpor_lifecycle::guest::FilesMount { read_only: true, ..files(&disk, 1, "guest") };
    let _served = machine.mount(mount, &Server::new(&disk.volume(), true));
    let path = disk.beside("guest").join("file");
    assert_eq!(fs::read_to_string(&path).unwrap(), "content");
    let refused = fs::write(&path, "other").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
}

#[test]
fn a_full_volume_says_so_and_lets_things_be_removed() {
    let Some(world) = World::new(8) else { return };
    let mut file = File::create(world.path("big")).unwrap();
    let block = vec![1; 1 << 20];
    let full = (0..20).find_map(|_| file.write_all(&block).err()).unwrap();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    // It is open.
    fs::remove_file(world.path("big")).unwrap();
    drop(file);
    eventually("there is room", || fs::write(world.path("small"), vec![1; 1 << 20]).ok());
}

#[test]
fn a_mount_that_is_used_is_not_taken_away_unless_forced() {
    let Some(mut world) = World::new(32) else { return };
    let held = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(world.path("held"))
        .unwrap();
    let refused = world.machine.unmount(1, false).unwrap_err();
    let torpor_lifecycle::guest::GuestError::Refused { code, message } = refused else {
        panic!("{refused}")
    };
    assert_eq!(code, FailureCode::Busy);
    assert!(message.to_string().contains(&format!("({})", std::process::id())), "{message}");
    drop(held);
    world.machine.unmount(1, false).unwrap();
    world.machine.unmount(1, false).unwrap();
    assert!(!world.path("held").exists() && world.host("held").exists());
    world.serve();
    let mut held = File::create(world.path("again")).unwrap();
    world.machine.unmount(1, true).unwrap();
    assert!(!world.path("again").exists());
    eventually("its holder gets an error", || {
        held.write_all(b"x").and_then(|()| held.flush()).err()
    });
}

#[test]
fn the_agent_itself_uses_files_and_starts_programs_there() {
    let Some(world) = World::new(32) else { return };
    let path = world.path("file").to_str().unwrap().to_owned();
    fs::copy("/bin/cat", world.path("cat")).unwrap();
    fs::write(world.path("file"), "content").unwrap();
    let stat = world.machine.run(world.machine.guest().stat(&Request::Stat { path })).unwrap();
    assert_eq!(stat.size, 7);
    let spec = torpor_protocol::guest::ProcessSpec {
        command: vec!["./cat".into(), "file".into()],
        cwd: Some(world.path("").to_str().unwrap().to_owned()),
        ..Default::default()
    };
    let output = world.machine.run(async {
        let mut stream = world.machine.guest().open(&Request::Run(spec)).await.unwrap();
        let Reply::Started(_) = stream.reply().await.unwrap() else { panic!("not started") };
        stream.data().await.unwrap().unwrap()
    });
    assert_eq!(&output[..], b"content");
}
