use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use tokio::time::Instant;
use torpor_qemu::build::Accel;
use torpor_qemu::jail::{Jail, Seen};
use torpor_qemu::line::{Card, Line, Origin, inside};
use crate::machine::{Machine, Place, USER};

fn talk(s: &mut UnixStream, say: &str, until: &str) -> String {
    s.write_all(say.as_bytes()).unwrap();
    let mut all = String::new();
    let mut b = [0u8; 65536];
    s.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    while !all.contains(until) {
        let n = s.read(&mut b).unwrap();
        assert!(n > 0, "{all}");
        all += &String::from_utf8_lossy(&b[..n]);
    }
    all
}

fn jail(place: &Place, name: &str, origin: Origin, memory: &PathBuf, disk: &PathBuf) -> Jail {
    let d = place.directory.path();
    let kernel = glob();
    let image = d.join("image");
    fs::write(&image, vec![0; 4096]).unwrap();
    let mut jail = place.jail(name, Origin::Revive, memory);
    jail.seen = place.build.seen();
    jail.seen.extend([Seen::read(&image, inside::ROOT), Seen::write(disk, inside::DISK), Seen::read(memory, inside::MEMORY)]);
    if matches!(origin, Origin::Boot { .. }) {
        jail.seen.push(Seen::read(kernel, inside::KERNEL));
        jail.seen.push(Seen::read("/tmp/q6work/initrd", inside::INITRAMFS));
    }
    let tap = std::env::var("TAP").ok();
    let card = tap.as_ref().map(|_| Card { mac: [2, 0, 0, 0, 0, 7] });
    let cpus = std::env::var("CPUS").map_or(1, |c| c.parse().unwrap());
    jail.tap = tap.map(PathBuf::from);
    jail.arguments = Line { accel: Accel::Tcg, memory_mib: 512, cpus, card, origin }.arguments();
    jail
}

fn glob() -> PathBuf {
    fs::read_dir("/tmp/torpor-kernels").unwrap().map(|e| e.unwrap().path().join("vmlinux")).find(|p| p.exists()).unwrap()
}

#[tokio::test]
async fn byhand() {
    let Some(place) = Place::find().await else { return };
    println!("{:?}", place.build);
    let d = place.directory.path();
    let memory = d.join("memory");
    fs::File::create(&memory).unwrap().set_len(512 << 20).unwrap();
    let disk = d.join("disk");
    fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    chown(&disk, Some(USER), Some(USER)).unwrap();
    fs::set_permissions(&memory, PermissionsExt::from_mode(0o644)).unwrap();
    let boot = Origin::Boot { mtu: 1400, tick_khz: place.build.tick_khz };
    let t = Instant::now();
    let m = Machine::start(jail(&place, "a", boot, &memory, &disk)).unwrap();
    let mut mon = m.monitor().await;
    println!("monitor {:?}", t.elapsed());
    let mut agent = UnixStream::connect(m.home.join("run/agent")).unwrap();
    println!("{}", talk(&mut agent, "", "READY"));
    println!("boot {:?}", t.elapsed());
    println!("{}", talk(&mut agent, "x", "pong"));
    println!("{}", talk(&mut agent, "wA", "pong"));
    println!("disk {}", std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&disk).unwrap()) / 2);
    println!("{}", talk(&mut agent, "w\0", "pong"));
    println!("disk after zeros {}", std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&disk).unwrap()) / 2);
    if std::env::var("KMSG").is_ok() { println!("{}", talk(&mut agent, "k", "pong")); }
    drop(agent);
    let t = Instant::now();
    mon.stop().await.unwrap();
    let state = mon.save_state().await.unwrap();
    println!("stop+save {:?} {} bytes", t.elapsed(), state.len());
    let maps = fs::read_to_string(m.proc("maps")).unwrap();
    let map = maps.lines().find(|l| l.ends_with("/memory")).unwrap();
    let start = u64::from_str_radix(map.split('-').next().unwrap(), 16).unwrap();
    let mut bytes = vec![0u8; 512 << 20];
    std::os::unix::fs::FileExt::read_exact_at(&fs::File::open(m.proc("mem")).unwrap(), &mut bytes, start).unwrap();
    let image = d.join("memory2");
    fs::write(&image, &bytes).unwrap();
    drop(bytes);
    mon.quit().await.unwrap();
    println!("end {}", m.ends().await);
    for i in 0..10 {
        let j = jail(&place, &format!("r{i}"), Origin::Revive, &image, &disk);
        let t = Instant::now();
        let m = Machine::start(j).unwrap();
        let a = t.elapsed();
        let mut mon = m.monitor().await;
        let b = t.elapsed();
        mon.load_state(&state).await.unwrap();
        let c = t.elapsed();
        mon.resume().await.unwrap();
        let mut agent = UnixStream::connect(m.home.join("run/agent")).unwrap();
        let said = talk(&mut agent, "x", "pong");
        println!("starter {a:?} monitor {b:?} loaded {c:?} pong {:?} {said}", t.elapsed());
        if i == 8 {
            agent.write_all(b"p").unwrap();
            println!("poweroff: {}", m.ends().await);
        } else if i == 9 {
            agent.write_all(b"c").unwrap();
            println!("panic: {}", m.ends().await);
        } else if i == 0 {
            // warm pause: stop for 3 s, and complaints
            mon.stop().await.unwrap();
            println!("{:?}", mon.status().await);
            tokio::time::sleep(std::time::Duration::from_secs(2)).await;
            mon.resume().await.unwrap();
            println!("{}", talk(&mut agent, "x", "pong"));
        }
    }
}
