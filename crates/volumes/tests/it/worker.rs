//! A daemon that works on volumes without end, and is killed at any moment. It says in a log what it begins and what
//! it has done.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::store::Volumes as _;
use torpor_protocol::VolumeId;

use crate::week::{Random, SIZE_MAX_MIB};
use crate::world::{Place, World, record};

const DIR: &str = "TORPOR_TEST_WORKER_DIR";
const SEED: &str = "TORPOR_TEST_WORKER_SEED";
const LOG: &str = "log";
const END: &str = "end";
/// For a process that starts on a busy host.
const PATIENCE: Duration = Duration::from_secs(60);

/// What it does to a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Work {
    Write {
        volume: VolumeId,
        file: String,
        text: String,
    },
    Grow {
        volume: VolumeId,
        size_mib: u64,
    },
    /// Copies it, and removes the copy.
    Copy {
        volume: VolumeId,
    },
}

impl Work {
    fn line(&self) -> String {
        match self {
            Self::Write { volume, file, text } => format!("write {volume} {file} {text}"),
            Self::Grow { volume, size_mib } => format!("grow {volume} {size_mib}"),
            Self::Copy { volume } => format!("copy {volume}"),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split(' ').collect();
        let volume = words.get(1)?.parse().ok()?;
        match words[..] {
            ["write", _, file, text] => {
                Some(Self::Write { volume, file: file.to_owned(), text: text.to_owned() })
            }
            ["grow", _, size] => Some(Self::Grow { volume, size_mib: size.parse().ok()? }),
            ["copy", _] => Some(Self::Copy { volume }),
            _ => None,
        }
    }
}

/// Not a test of its own: the daemon that is killed.
#[tokio::test(flavor = "multi_thread")]
async fn worker() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let dir = Path::new(&dir);
    let mut random = Random(std::env::var(SEED).unwrap().parse().unwrap());
    let world = World::open(dir).await;
    let mut log = OpenOptions::new().create(true).append(true).open(dir.join(LOG)).unwrap();
    let volumes = world.ledger.volumes(None, None, 100).await.unwrap();
    for n in 0.. {
        let volume = volumes[random.draw(volumes.len())].id.clone();
        let work = match random.draw(10) {
            0..6 => {
                let file = format!("file-{}", random.draw(5));
                Work::Write { volume, file, text: format!("worker-{n}") }
            }
            6..8 => Work::Copy { volume },
            _ => Work::Grow { volume, size_mib: SIZE_MAX_MIB },
        };
        writeln!(log, "{}", work.line()).unwrap();
        do_it(&world, &work).await;
        writeln!(log, "{END}").unwrap();
    }
}

async fn do_it(world: &World, work: &Work) {
    match work {
        Work::Write { volume, file, text } => {
            let open = world.volumes.open(volume).await.unwrap();
            // Whole or not at all.
            let fresh = open.dir.join("fresh.tmp");
            fs::write(&fresh, text).unwrap();
            File::open(&fresh).unwrap().sync_all().unwrap();
            fs::rename(fresh, open.dir.join(file)).unwrap();
        }
        Work::Grow { volume, size_mib } => {
            world.volumes.grow(volume, *size_mib).await.unwrap();
        }
        Work::Copy { volume } => {
            let of = world.ledger.volumes(None, None, 100).await.unwrap();
            let of = of.into_iter().find(|of| of.id == *volume).unwrap();
            let copy = record("copy", of.size_mib);
            world.volumes.copy(volume, &copy).await.unwrap();
            world.volumes.remove(&copy.id).await.unwrap();
        }
    }
}

/// Has a daemon work, and kills it in the midst of its `lines`th word: what it did, and what it may have done.
pub(crate) async fn work_and_be_killed(
    place: &Place,
    seed: u64,
    lines: usize,
) -> (Vec<Work>, Option<Work>) {
    let path = place.path().join(LOG);
    let _ = fs::remove_file(&path);
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "worker::worker", "--nocapture"])
        .env(DIR, place.path())
        .env(SEED, seed.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + PATIENCE;
    let said = || fs::read_to_string(&path).unwrap_or_default();
    while said().lines().count() < lines {
        assert!(Instant::now() < deadline, "it says no more than {}", said());
        assert_eq!(worker.try_wait().unwrap(), None, "it ended by itself after {}", said());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    worker.kill().unwrap();
    worker.wait().unwrap();
    let (mut done, mut begun) = (Vec::new(), None);
    for line in said().lines() {
        match line {
            END => done.extend(begun.take()),
            line => begun = Some(Work::parse(line).unwrap()),
        }
    }
    (done, begun)
}
