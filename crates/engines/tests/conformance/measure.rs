//! Temporary.
use std::time::Duration;
use tokio::time::Instant;
use torpor_lifecycle::engine::{Engine, Machine};
use crate::saves::{revive, stage};
use crate::world::{boot, greet, say, eventually, world, World};
use torpor_protocol::Resources;

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap();
    println!("{what:40} min {:7.2} med {:7.2} p95 {:7.2} max {:7.2}  n={} load {}", ms(times[0]), ms(times[times.len()/2]), ms(times[times.len()*95/100]), ms(*times.last().unwrap()), times.len(), load.split(' ').next().unwrap());
}

fn hash_and_sync(dir: &std::path::Path) {
    for f in ["checkpoint.img", "pages_meta.img", "pages.img"] {
        let mut file = std::fs::File::open(dir.join(f)).unwrap();
        let mut h = blake3::Hasher::new();
        std::io::copy(&mut file, &mut h).unwrap();
        file.sync_all().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn figures() {
    let Some(mut world) = world().await else { return };
    if std::env::var("MEASURE").is_err() { return }
    for mb in [0, 100] {
        let mut plan = world.plan();
        plan.spec.resources = Resources { memory_mib: 1024, disk_mib: 64, cpus: std::env::var("CPUS").map_or(1.0, |c| c.parse().unwrap()), ..Resources::default() };
        world.config.shells = 0; world.reopen().await;
        let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
        if mb > 0 { say(&guest, &format!("dd if=/dev/urandom of=/dev/shm/big bs=1M count={mb}")).await; }
        guest.health().await.unwrap();
        let (mut pause, mut resume, mut answer) = (vec![], vec![], vec![]);
        for _ in 0..40 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let t = Instant::now(); machine.pause().await.unwrap(); pause.push(t.elapsed());
            tokio::time::sleep(Duration::from_millis(30)).await;
            let t = Instant::now(); machine.resume().await.unwrap(); resume.push(t.elapsed());
            guest.health().await.unwrap(); answer.push(t.elapsed());
        }
        for wait in [0, 3, 10, 30] {
            let mut v = vec![];
            for _ in 0..40 {
                tokio::time::sleep(Duration::from_millis(30)).await;
                machine.pause().await.unwrap();
                tokio::time::sleep(Duration::from_millis(30)).await;
                machine.resume().await.unwrap();
                tokio::time::sleep(Duration::from_millis(wait)).await;
                let t = Instant::now();
                guest.health().await.unwrap(); v.push(t.elapsed());
            }
            v.sort();
            println!("{:?}", v.iter().map(|d| (d.as_secs_f64()*1e4).round()/10.0).collect::<Vec<_>>());
            show(&format!("{mb} MB resumed, {wait} ms, answer"), v);
        }
        let (mut base, mut thaw) = (vec![], vec![]);
        let hierarchy = torpor_engines::limits::Hierarchy::discover().unwrap();
        let group = torpor_engines::limits::Group::open(&hierarchy, &world.config.tag, &world.machine_of(&plan.id).unwrap());
        for _ in 0..40 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let t = Instant::now(); guest.health().await.unwrap(); base.push(t.elapsed());
            tokio::time::sleep(Duration::from_millis(30)).await;
            group.freeze().unwrap();
            tokio::time::sleep(Duration::from_millis(30)).await;
            let t = Instant::now(); group.thaw().unwrap(); guest.health().await.unwrap(); thaw.push(t.elapsed());
        }
        show(&format!("{mb} MB base answer"), base); show(&format!("{mb} MB thaw only->answer"), thaw);
        show(&format!("{mb} MB pause"), pause); show(&format!("{mb} MB resume"), resume); show(&format!("{mb} MB resume->answer"), answer);
        if std::env::var("MEASURE").unwrap() == "pause" { machine.kill().await.unwrap(); continue }
        let (mut live, mut felt, mut cold, mut durable) = (vec![], vec![], vec![], vec![]);
        for _ in 0..10 {
            let save = stage();
            let t = Instant::now(); felt.push(machine.save(save.path()).await.unwrap().pause); live.push(t.elapsed());
        }
        let mut save = stage();
        for _ in 0..12 {
            machine.pause().await.unwrap();
            save = stage();
            let t = Instant::now(); machine.save(save.path()).await.unwrap(); cold.push(t.elapsed());
            let p = save.path().to_owned();
            tokio::task::spawn_blocking(move || hash_and_sync(&p)).await.unwrap(); durable.push(t.elapsed());
            machine.resume().await.unwrap();
        }
        show(&format!("{mb} MB live save"), live); show(&format!("{mb} MB felt pause"), felt); show(&format!("{mb} MB paused save"), cold); show(&format!("{mb} MB save+hash+fsync"), durable);
        let mut kills = vec![];
        let t = Instant::now(); machine.kill().await.unwrap(); kills.push(t.elapsed());
        for shells in [0, 2] {
            if let Some(old) = world.take_engine() { old.close().await; }
            world.config.shells = shells; world.reopen().await;
            world.engine().expect(&plan);
            let mut steps: std::collections::BTreeMap<&str, Vec<Duration>> = Default::default();
            let (mut rev, mut ans, mut boots, mut bans) = (vec![], vec![], vec![], vec![]);
            for round in 0..12 {
                shelf_full(&world, shells).await;
                let t = Instant::now();
                let machine = world.engine().revive(plan.clone(), save.path()).await.unwrap(); rev.push(t.elapsed());
                let guest = greet(machine.channel()).await; guest.health().await.unwrap(); ans.push(t.elapsed());
                for (s, d) in machine.start_steps() { steps.entry(s).or_default().push(d); }
                let t = Instant::now(); machine.kill().await.unwrap(); kills.push(t.elapsed());
                if mb == 0 && round < 10 {
                    shelf_full(&world, shells).await;
                    let t = Instant::now();
                    let machine = world.engine().boot(plan.clone()).await.unwrap(); boots.push(t.elapsed());
                    let guest = greet(machine.channel()).await; guest.health().await.unwrap(); bans.push(t.elapsed());
                    machine.kill().await.unwrap();
                }
            }
            show(&format!("{mb} MB revive shells={shells}"), rev); show(&format!("{mb} MB revive->answer shells={shells}"), ans);
            for (s, d) in steps { show(&format!("    {s}"), d); }
            if mb == 0 { show(&format!("boot shells={shells}"), boots); show(&format!("boot->answer shells={shells}"), bans); }
        }
        show("kill", kills);
    }
}

async fn shelf_full(world: &World, shells: usize) {
    eventually("full", || {
        let ready = world.records().into_iter().filter(|(id, r)| r["sandbox"].is_null() && world.frozen(id)).count();
        ready >= shells
    }).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
}
