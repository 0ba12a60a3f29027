//! What journals promise.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use torpor_lifecycle::store::Journal as _;

use super::*;

struct World {
    journals: Journals,
    layout: Arc<Layout>,
    id: SandboxId,
    _dir: tempfile::TempDir,
}

fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let layout = Arc::new(Layout::open(dir.path()).unwrap());
    let journals = Journals::open(layout.clone());
    World { journals, layout, id: SandboxId::random(), _dir: dir }
}

impl World {
    async fn say(&self, lines: &[LogLine]) {
        self.journals.append(&self.id, lines).await.unwrap();
    }

    async fn read(&self, search: Search) -> Vec<u64> {
        let found = self.journals.read(&self.id, &search).await.unwrap();
        found.iter().map(|line| line.stamp_us).collect()
    }

    async fn last(&self) -> u64 {
        self.journals.last(&self.id).await.unwrap()
    }

    /// Speaks until the full file steps back.
    async fn fill(&self, stamp: &mut u64) {
        let place = self.layout.journal_before(&self.id);
        let before = || place.metadata().ok().map(|file| file.ino());
        let first = before();
        while before() == first {
            self.say(&lines(*stamp + 1..=*stamp + 2000)).await;
            *stamp += 2000;
        }
    }

    /// As after a restart of the daemon.
    fn forget(&mut self) {
        self.journals = Journals::open(self.layout.clone());
    }

    fn path(&self) -> PathBuf {
        self.layout.journal(&self.id)
    }

    /// Adds to a file behind the journal's back.
    fn scribble(&self, bytes: &[u8]) {
        open_to_write(&self.path()).unwrap().write_all(bytes).unwrap();
    }
}

fn line(stamp_us: u64) -> LogLine {
    LogLine {
        stamp_us,
        pid: 7,
        started_at_ms: 70,
        command: "server".to_owned(),
        name: None,
        stderr: false,
        text: format!("line \"{stamp_us}\"\tü"),
    }
}

fn lines(stamps: impl IntoIterator<Item = u64>) -> Vec<LogLine> {
    stamps.into_iter().map(line).collect()
}

/// Everything after a stamp.
fn after(after_us: u64) -> Search {
    Search { after_us, limit: usize::MAX, ..Search::default() }
}

fn size(path: &Path) -> u64 {
    path.metadata().unwrap().len()
}

#[tokio::test]
async fn what_was_said_is_read_as_it_was_also_after_a_restart() {
    let mut world = world();
    let mut said = lines([1, 2, 3]);
    said[1].stderr = true;
    said[1].name = Some("web".to_owned());
    said[2].text = "\0 \u{2028} \n {\"stamp_us\":9}".to_owned();
    world.say(&said[..2]).await;
    world.say(&said[2..]).await;
    for _ in 0..2 {
        assert_eq!(world.journals.read(&world.id, &after(0)).await.unwrap(), said);
        assert_eq!(world.last().await, 3);
        world.forget();
    }
}

#[tokio::test]
async fn a_sandbox_that_never_spoke_has_an_empty_journal_and_no_file() {
    let world = world();
    world.say(&[]).await;
    assert_eq!(world.last().await, 0);
    assert_eq!(world.read(after(0)).await, [0u64; 0]);
    assert!(!world.path().exists());
}

#[tokio::test]
async fn a_line_that_is_there_is_not_written_twice() {
    let mut world = world();
    world.say(&lines([1, 2])).await;
    world.forget();
    world.say(&lines([1, 2, 3])).await;
    world.say(&lines([3])).await;
    assert_eq!(world.read(after(0)).await, [1, 2, 3]);
}

#[tokio::test]
async fn a_search_finds_what_it_describes() {
    let world = world();
    let mut said = lines(1..=8);
    said[1].stderr = true;
    said[2].pid = 8;
    said[3].started_at_ms = 71;
    said[4].text = "an Error here".to_owned();
    said[5].stderr = true;
    said[5].text = "Error".to_owned();
    world.say(&said).await;
    let all = || after(0);
    assert_eq!(world.read(Search { stderr: Some(true), ..all() }).await, [2, 6]);
    assert_eq!(world.read(Search { stderr: Some(false), ..all() }).await, [1, 3, 4, 5, 7, 8]);
    assert_eq!(world.read(Search { text: Some("Error".to_owned()), ..all() }).await, [5, 6]);
    assert_eq!(world.read(Search { text: Some("error".to_owned()), ..all() }).await, [0u64; 0]);
    let processes = vec![(8, 70), (7, 71), (8, 71)];
    assert_eq!(world.read(Search { processes, ..all() }).await, [3, 4]);
    assert_eq!(world.read(after(6)).await, [7, 8]);
    assert_eq!(world.read(after(8)).await, [0u64; 0]);
    assert_eq!(world.read(Search { limit: 2, ..all() }).await, [1, 2]);
    assert_eq!(world.read(Search { limit: 0, ..all() }).await, [0u64; 0]);
    assert_eq!(world.read(Search { limit: 2, newest: true, ..all() }).await, [7, 8]);
    let errors = Search { limit: 1, newest: true, stderr: Some(true), ..all() };
    assert_eq!(world.read(errors).await, [6]);
    let several = Search { text: Some("line".to_owned()), ..after(1) };
    assert_eq!(world.read(Search { limit: 2, ..several }).await, [2, 3]);
}

#[tokio::test]
async fn a_torn_last_line_is_skipped_and_not_continued() {
    let mut world = world();
    world.say(&lines([1, 2])).await;
    let whole = serde_json::to_vec(&line(3)).unwrap();
    for torn in [&whole[..9], &whole[..]] {
        world.scribble(torn);
        world.forget();
        assert_eq!(world.last().await, 2);
        assert_eq!(world.read(after(0)).await, [1, 2]);
    }
    world.scribble(&[0xff, b'\n', b'{', b'}', b'\n', b'{']);
    world.say(&lines([4])).await;
    world.forget();
    assert_eq!(world.read(after(0)).await, [1, 2, 4]);
    assert_eq!(world.last().await, 4);
}

#[tokio::test]
async fn a_full_file_steps_back_and_the_one_before_it_goes() {
    let mut world = world();
    let before = world.layout.journal_before(&world.id);
    let mut stamp = 0;
    for round in 0..3 {
        world.fill(&mut stamp).await;
        assert!(size(&before) <= FILE_MAX && size(&before) > FILE_MAX - 1000);
        assert!(size(&world.path()) <= FILE_MAX);
        let kept = world.read(after(0)).await;
        assert_eq!(*kept.last().unwrap(), stamp);
        // Without a gap.
        assert_eq!(kept.len() as u64, stamp - kept[0] + 1);
        assert_eq!(kept[0] == 1, round == 0, "{}", kept[0]);
    }
    world.forget();
    assert_eq!(world.last().await, stamp);
}

#[tokio::test]
async fn every_stamp_is_found_in_both_files() {
    let world = world();
    // Gaps between the stamps, and lines of many lengths.
    let mut said = lines((1..=30_000).map(|n| n * 10));
    for (n, line) in said.iter_mut().enumerate() {
        line.text = "x".repeat(n * 7919 % 400);
    }
    world.say(&said).await;
    assert!(world.layout.journal_before(&world.id).exists());
    let kept = world.read(after(0)).await;
    let mut probes: Vec<u64> = kept.iter().copied().step_by(997).collect();
    probes.extend([1, kept[0], kept[kept.len() - 2], kept[kept.len() - 1], u64::MAX]);
    for probe in probes.into_iter().flat_map(|n| [n - 1, n, n.saturating_add(1)]) {
        let rest: Vec<_> = kept.iter().copied().filter(|stamp| *stamp > probe).collect();
        let first = rest.iter().copied().take(3).collect::<Vec<_>>();
        assert_eq!(world.read(Search { limit: 3, ..after(probe) }).await, first, "{probe}");
        let newest = Search { limit: 3, newest: true, ..after(probe) };
        assert_eq!(world.read(newest).await, rest[rest.len().saturating_sub(3)..], "{probe}");
    }
    // More than the newest file has.
    let many = Search { limit: kept.len() - 5, newest: true, ..after(0) };
    assert_eq!(world.read(many).await, kept[5..]);
}

#[tokio::test]
async fn a_batch_of_any_size_keeps_to_the_limit_of_a_file() {
    let world = world();
    let mut said = lines(1..=40);
    for line in &mut said {
        line.text = "x".repeat(900_000);
    }
    said[20].text = "y".repeat(LINE_MAX);
    world.say(&said).await;
    assert!(size(&world.path()) <= FILE_MAX);
    assert!(size(&world.layout.journal_before(&world.id)) <= FILE_MAX);
    assert_eq!(world.last().await, 40);
    assert_eq!(world.read(Search { text: Some("y".to_owned()), ..after(0) }).await, [0u64; 0]);
}

#[tokio::test]
async fn the_last_stamp_is_found_below_much_that_is_no_line() {
    let mut world = world();
    world.say(&lines([1, 2])).await;
    world.scribble(&b"no line\n".repeat(100_000));
    world.forget();
    assert_eq!(world.last().await, 2);
}

#[tokio::test]
async fn the_last_stamp_is_read_from_the_disk_once() {
    let mut world = world();
    world.say(&lines([1, 2])).await;
    world.forget();
    assert_eq!(world.last().await, 2);
    std::fs::remove_file(world.path()).unwrap();
    assert_eq!(world.last().await, 2);
    // Many others make it forgotten, not wrong.
    for _ in 0..REMEMBERED {
        world.journals.shared.remember(&SandboxId::random(), 1);
    }
    assert!(world.journals.shared.last.lock().len() <= REMEMBERED);
    assert_eq!(world.last().await, 0);
}

#[tokio::test]
async fn a_sweep_takes_the_journals_of_those_whom_nobody_knows() {
    let world = world();
    let stranger = SandboxId::random();
    world.say(&lines([1])).await;
    world.journals.append(&stranger, &lines([1])).await.unwrap();
    let before = world.layout.journal_before(&stranger);
    std::fs::write(&before, "").unwrap();
    std::fs::write(world.layout.logs().join("readme"), "").unwrap();
    let both = HashSet::from([world.id.clone(), stranger.clone()]);
    assert_eq!(world.journals.owners().await.unwrap(), both);
    world.journals.erase(vec![stranger.clone()]).await.unwrap();
    world.journals.erase(vec![stranger.clone()]).await.unwrap();
    assert!(!world.layout.journal(&stranger).exists() && !before.exists());
    assert_eq!(world.journals.last(&stranger).await.unwrap(), 0);
    assert_eq!(world.read(after(0)).await, [1]);
    assert!(world.layout.logs().join("readme").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_read_and_write_at_once_see_every_line_in_order() {
    let world = world();
    let (journals, id) = (world.journals.clone(), world.id.clone());
    let writer = tokio::spawn(async move {
        for n in 0..60 {
            let batch = lines(n * 1000 + 1..=(n + 1) * 1000);
            journals.append(&id, &batch).await.unwrap();
        }
    });
    let read_all = async {
        let mut seen = 0;
        while seen < 60_000 {
            for stamp in world.read(Search { limit: 1500, ..after(seen) }).await {
                assert_eq!(stamp, seen + 1);
                seen = stamp;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), read_all).await.unwrap();
    writer.await.unwrap();
    // The files were changed meanwhile.
    assert!(world.layout.journal_before(&world.id).exists());
}

#[tokio::test]
async fn of_a_sandbox_that_is_gone_the_last_words_are_kept_and_a_short_life_whole() {
    let mut world = world();
    world.say(&lines([1, 2])).await;
    world.journals.close(&world.id).await.unwrap();
    assert_eq!(world.read(after(0)).await, [1, 2]);
    let mut stamp = 2;
    world.fill(&mut stamp).await;
    world.journals.close(&world.id).await.unwrap();
    world.forget();
    let kept = world.read(after(0)).await;
    assert_eq!((kept.last(), world.last().await), (Some(&stamp), stamp));
    assert!(kept.len() > 1000 && kept.windows(2).all(|pair| pair[0] + 1 == pair[1]));
    assert!(!world.path().exists());
    let before = size(&world.layout.journal_before(&world.id));
    assert!(before <= LAST_WORDS && before > LAST_WORDS - 1000, "{before}");
    let nobody = SandboxId::random();
    world.journals.close(&nobody).await.unwrap();
}
