//! Saves that belong together, and mixes of them.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::process::Command;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::memory::Run;
use crate::memory::guest::Guest;

const PAGES: u64 = 96;
const BYTES: u64 = PAGES * PAGE;
const PAGE_BYTES: usize = PAGE as usize;
const DISK: u64 = 8 * 1024 * 1024;

/// The content of memory: pages that are not zero, and what they are full of.
type Content = BTreeMap<u64, u8>;

/// A sealed memory file with this content.
fn memory_file(path: &Path, content: &Content, unit: &UnitId) -> File {
    let file = create(path, None).unwrap();
    for (page, byte) in content {
        file.write_all_at(&[*byte; PAGE_BYTES], page * PAGE).unwrap();
    }
    seal::write(&file, Kind::Memory, BYTES, unit).unwrap();
    file
}

fn content_of(file: &File, from: u64) -> Content {
    let mut content = Content::new();
    for page in 0..PAGES {
        let mut bytes = [0; PAGE_BYTES];
        file.read_exact_at(&mut bytes, from + page * PAGE).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page} is torn");
        if bytes[0] != 0 {
            content.insert(page, bytes[0]);
        }
    }
    content
}

fn pages_in(file: &File) -> u64 {
    data_bytes(file).unwrap() / PAGE
}

/// A whole save in a directory: memory with a delta, disk, state.
fn save(dir: &Path, mark: u8) -> About {
    let (unit, base_unit) = (UnitId::random().unwrap(), UnitId::random().unwrap());
    let base = memory_file(&dir.join(MEMORY_FILE), &Content::from([(0, mark)]), &base_unit);
    let guest = Guest::new(&base, BYTES, &[(3, mark)]);
    let runs = guest.memory.written().unwrap();
    let delta = create(&dir.join(DELTA_FILE), None).unwrap();
    write_delta(&guest.memory, &runs, &base, (&unit, &base_unit), &delta).unwrap();
    let disk = create(&dir.join(DISK_FILE), None).unwrap();
    copy_disk(&working_disk(), &disk, DISK, Some(&unit)).unwrap();
    std::fs::write(dir.join(STATE_FILE), [mark; 12_345]).unwrap();
    let about = About {
        format: About::FORMAT,
        unit,
        base: Some(base_unit),
        memory_bytes: BYTES,
        disk_bytes: DISK,
        cpus: 1,
        qemu: "10.0.2".to_owned(),
        kernel: "6.12".to_owned(),
        cpu: "max".to_owned(),
        accel: "tcg".to_owned(),
        state_hash: hash_state(dir).unwrap(),
    };
    write_about(dir, &about, None).unwrap();
    about
}

/// Some data, much nothing, and no seal.
fn working_disk() -> File {
    let disk = tempfile::tempfile().unwrap();
    disk.write_all_at(&[5; 10_000], 1024 * 1024).unwrap();
    disk.write_all_at(&[6; PAGE_BYTES], DISK - PAGE).unwrap();
    disk
}

fn saved(mark: u8) -> (TempDir, About) {
    let dir = tempfile::tempdir().unwrap();
    let about = save(dir.path(), mark);
    (dir, about)
}

/// The file that an error names.
fn blamed(dir: &Path) -> &'static str {
    match open(dir).expect_err("it is refused") {
        UnitError::Unreadable { file, .. }
        | UnitError::Damaged { file, .. }
        | UnitError::Mixed { file, .. }
        | UnitError::Newer { file, .. } => file,
    }
}

const FILES: [&str; 5] = [MEMORY_FILE, DELTA_FILE, STATE_FILE, DISK_FILE, ABOUT_FILE];

#[test]
fn a_save_is_opened_with_all_that_was_written() {
    let (dir, about) = saved(7);
    let unit = open(dir.path()).unwrap();
    assert_eq!(unit.about, about);
    assert_eq!(content_of(&unit.memory, 0), Content::from([(0, 7)]));
    let fork = Guest::new(&unit.memory, BYTES, &[]);
    fork.memory.copy_in(&unit.delta.unwrap()).unwrap();
    assert_eq!(fork.memory.written().unwrap(), [Run { first_page: 3, count: 1 }]);
    let mut state = Vec::new();
    { unit.state }.read_to_end(&mut state).unwrap();
    assert_eq!(state, [7; 12_345], "it is read from its beginning");
    let mut end = [0; PAGE_BYTES];
    unit.disk.read_exact_at(&mut end, DISK - PAGE).unwrap();
    assert_eq!(end, [6; PAGE_BYTES]);
}

#[test]
fn a_file_of_another_save_is_refused() {
    for name in FILES {
        let ((one, _), (two, _)) = (saved(1), saved(2));
        open(one.path()).unwrap();
        std::fs::copy(two.path().join(name), one.path().join(name)).unwrap();
        let found = open(one.path()).expect_err(name);
        assert!(matches!(found, UnitError::Mixed { .. }), "{found:?}");
        if name != ABOUT_FILE {
            assert_eq!(blamed(one.path()), name);
        }
    }
}

#[test]
fn a_disk_of_a_later_save_of_the_same_machine_is_refused() {
    let (dir, about) = saved(1);
    let path = dir.path().join(DISK_FILE);
    let before = open(dir.path()).unwrap().disk;
    std::fs::remove_file(&path).unwrap();
    let later = UnitId::random().unwrap();
    copy_disk(&before, &create(&path, None).unwrap(), DISK, Some(&later)).unwrap();
    assert_eq!(blamed(dir.path()), DISK_FILE);
    std::fs::remove_file(&path).unwrap();
    copy_disk(&before, &create(&path, None).unwrap(), DISK, None).unwrap();
    assert_eq!(blamed(dir.path()), DISK_FILE, "a machine's own disk is of no save");
    std::fs::remove_file(&path).unwrap();
    copy_disk(&before, &create(&path, None).unwrap(), DISK, Some(&about.unit)).unwrap();
    open(dir.path()).unwrap();
}

#[test]
fn memory_does_not_pass_for_a_disk() {
    let (dir, mut about) = saved(1);
    about.disk_bytes = BYTES;
    let path = dir.path().join(DISK_FILE);
    std::fs::remove_file(&path).unwrap();
    memory_file(&path, &Content::new(), &about.unit);
    std::fs::remove_file(dir.path().join(ABOUT_FILE)).unwrap();
    write_about(dir.path(), &about, None).unwrap();
    assert_eq!(blamed(dir.path()), DISK_FILE);
}

#[test]
fn a_torn_missing_or_foreign_file_is_refused_by_name() {
    for name in FILES {
        let (dir, _) = saved(1);
        let path = dir.path().join(name);
        let whole = std::fs::read(&path).unwrap();
        for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(blamed(dir.path()), name, "{cut} of {} bytes", whole.len());
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(blamed(dir.path()), name, "missing");
        let elsewhere = dir.path().join("elsewhere");
        std::fs::write(&elsewhere, &whole).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert_eq!(blamed(dir.path()), name, "a link");
        std::fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(blamed(dir.path()), name, "a pipe");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &whole).unwrap();
        open(dir.path()).unwrap();
    }
}

#[test]
fn a_delta_that_nobody_named_is_refused() {
    let (dir, mut about) = saved(1);
    about.base = None;
    let path = dir.path();
    for name in [MEMORY_FILE, ABOUT_FILE] {
        std::fs::remove_file(path.join(name)).unwrap();
    }
    memory_file(&path.join(MEMORY_FILE), &Content::new(), &about.unit);
    write_about(path, &about, None).unwrap();
    assert_eq!(blamed(path), DELTA_FILE);
    std::fs::remove_file(path.join(DELTA_FILE)).unwrap();
    assert!(open(path).unwrap().delta.is_none());
}

#[test]
fn what_a_newer_program_wrote_is_refused_with_the_reason() {
    let (dir, about) = saved(1);
    let path = dir.path().join(ABOUT_FILE);
    let text = format!(r#"{{ "format": {}, "unit": 5 }}"#, About::FORMAT + 1);
    std::fs::write(&path, text).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(error.to_string().contains("use a newer torpor"), "{error}");
    for odd in [0, PAGE + 1, u64::MAX - PAGE + 1] {
        std::fs::remove_file(&path).unwrap();
        write_about(dir.path(), &About { memory_bytes: odd, ..about.clone() }, None).unwrap();
        assert_eq!(blamed(dir.path()), ABOUT_FILE, "{odd}");
    }
}

#[test]
fn a_full_memory_file_has_holes_where_zeros_were_written() {
    let dir = tempfile::tempdir().unwrap();
    let unit = UnitId::random().unwrap();
    let before: Content = (0..40).map(|page| (page, 1)).collect();
    let base = memory_file(&dir.path().join("base"), &before, &unit);
    let writes: Vec<(u64, u8)> = (8..40).map(|page| (page, 0)).chain([(50, 9)]).collect();
    let guest = Guest::new(&base, BYTES, &writes);
    let full = create(&dir.path().join("full"), None).unwrap();
    let runs = guest.memory.written().unwrap();
    write_full(&base, &guest.memory, &runs, &unit, &full).unwrap();
    let mut expected: Content = (0..8).map(|page| (page, 1)).collect();
    expected.insert(50, 9);
    assert_eq!(content_of(&full, 0), expected);
    assert_eq!(pages_in(&full), 9);
    seal::check(&full, Kind::Memory, BYTES, &unit).unwrap();
    assert_eq!(content_of(&base, 0), before, "the base is as it was");
}

#[test]
fn zeros_on_a_hole_are_not_in_the_delta() {
    let dir = tempfile::tempdir().unwrap();
    let (unit, base_unit) = (UnitId::random().unwrap(), UnitId::random().unwrap());
    let base = memory_file(&dir.path().join("base"), &Content::from([(3, 1)]), &base_unit);
    let writes: Vec<(u64, u8)> = (0..20).map(|page| (page, 0)).chain([(30, 1)]).collect();
    let guest = Guest::new(&base, BYTES, &writes);
    let delta = create(&dir.path().join("delta"), None).unwrap();
    let runs = guest.memory.written().unwrap();
    let size = write_delta(&guest.memory, &runs, &base, (&unit, &base_unit), &delta).unwrap();
    assert_eq!(size, DeltaSize { data_pages: 1, zero_pages: 1, same_pages: 19 });
    let delta = Delta::open(delta, &unit, &base_unit, BYTES).unwrap();
    let fork = Guest::new(&base, BYTES, &[]);
    fork.memory.copy_in(&delta).unwrap();
    let one = |first_page| Run { first_page, count: 1 };
    assert_eq!(fork.memory.written().unwrap(), [one(3), one(30)]);
}

#[test]
fn a_copied_disk_has_the_same_holes_and_content() {
    let (from, to) = (working_disk(), tempfile::tempfile().unwrap());
    copy_disk(&from, &to, DISK, None).unwrap();
    assert_eq!(to.metadata().unwrap().size(), DISK, "what a machine writes to has no seal");
    let unit = UnitId::random().unwrap();
    let (sealed, again) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    copy_disk(&to, &sealed, DISK, Some(&unit)).unwrap();
    copy_disk(&sealed, &again, DISK, None).unwrap();
    let content = |file: &File| {
        let mut bytes = vec![0; DISK as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    for copy in [&to, &sealed, &again] {
        assert!(content(copy) == content(&from));
        assert!(copy.metadata().unwrap().blocks() * 512 < DISK / 4, "holes stay holes");
    }
    assert_eq!(again.metadata().unwrap().size(), DISK);
    let error = copy_disk(&from, &tempfile::tempfile().unwrap(), DISK + 1, None).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "it is not that long");
}

#[test]
fn memory_is_linked_where_it_can_be_and_else_copied() {
    let dir = tempfile::tempdir().unwrap();
    let (unit, content) = (UnitId::random().unwrap(), Content::from([(1, 1), (90, 2)]));
    let base = memory_file(&dir.path().join("base"), &content, &unit);
    let (link, copy) = (dir.path().join("link"), dir.path().join("copy"));
    assert_eq!(link_or_copy(&base, &link, None).unwrap(), Placed::Linked);
    assert_eq!(link.metadata().unwrap().ino(), base.metadata().unwrap().ino());
    assert!(link_or_copy(&base, &link, None).is_err(), "nothing is replaced");
    for name in ["base", "link"] {
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    assert_eq!(link_or_copy(&base, &copy, None).unwrap(), Placed::Copied, "it has no name");
    let copy = File::open(copy).unwrap();
    seal::check(&copy, Kind::Memory, BYTES, &unit).unwrap();
    assert_eq!(content_of(&copy, 0), content);
    assert_eq!(pages_in(&copy), 2);
}

#[test]
fn a_file_is_for_its_owner_or_a_group_and_never_one_that_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let (own, shared) = (dir.path().join("own"), dir.path().join("shared"));
    create(&own, None).unwrap();
    let group = match rustix::process::geteuid().is_root() {
        true => 12_345,
        false => rustix::process::getegid().as_raw(),
    };
    create(&shared, Some(group)).unwrap();
    assert_eq!(own.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    let found = shared.metadata().unwrap();
    assert_eq!((found.permissions().mode() & 0o7777, found.gid()), (0o640, group));
    assert_eq!(create(&own, None).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
}

/// A filesystem of two megabytes; unmounted when dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            torpor_testkit::missing("only root can mount a small disk");
            return None;
        }
        let disk = Self(tempfile::tempdir().unwrap());
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=2m", "none"]).arg(disk.0.path());
        assert!(mount.status().unwrap().success());
        Some(disk)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_said_to_be_full_and_the_source_is_as_it_was() {
    let Some(small) = SmallDisk::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (unit, base_unit) = (UnitId::random().unwrap(), UnitId::random().unwrap());
    // Four megabytes below, three on top.
    let bytes = 8 * 1024 * 1024;
    let base = create(&dir.path().join("base"), None).unwrap();
    base.write_all_at(&vec![1; 4 << 20], 0).unwrap();
    seal::write(&base, Kind::Memory, bytes, &base_unit).unwrap();
    let writes: Vec<(u64, u8)> = (512..1280).map(|page| (page, 2)).collect();
    let guest = Guest::new(&base, bytes, &writes);
    let runs = guest.memory.written().unwrap();
    let there = create(&dir.path().join("delta"), None).unwrap();
    write_delta(&guest.memory, &runs, &base, (&unit, &base_unit), &there).unwrap();
    let delta = Delta::open(there, &unit, &base_unit, bytes).unwrap();

    let path = small.0.path().join("x");
    type Attempt<'a> = &'a dyn Fn() -> io::Result<()>;
    let to = || create(&path, None).unwrap();
    let attempts: [Attempt<'_>; 5] = [
        &|| write_delta(&guest.memory, &runs, &base, (&unit, &base_unit), &to()).map(drop),
        &|| write_full(&base, &guest.memory, &runs, &unit, &to()),
        &|| merge(&base, &delta, &unit, &to()),
        &|| copy_disk(&base, &to(), bytes, Some(&unit)),
        &|| link_or_copy(&base, &path, None).map(drop),
    ];
    for (index, attempt) in attempts.iter().enumerate() {
        let error = attempt().expect_err("there is no room");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{index}: {error}");
        std::fs::remove_file(&path).unwrap();
    }
    assert_eq!(guest.memory.written().unwrap(), runs);
    seal::check(&base, Kind::Memory, bytes, &base_unit).unwrap();
    assert_eq!(pages_in(&base), 1024);
    let there = create(&dir.path().join("full"), None).unwrap();
    write_full(&base, &guest.memory, &runs, &unit, &there).unwrap();
    assert_eq!(pages_in(&there), 1280, "where there is room it can still be written");
}

#[test]
fn ids_are_text_and_back() {
    let id = UnitId::random().unwrap();
    assert_eq!(UnitId::parse(&id.to_string()), Some(id));
    assert_eq!(serde_json::from_str::<UnitId>(&format!("\"{id}\"")).unwrap(), id);
    assert_ne!(UnitId::random().unwrap(), id);
    for text in ["", "+1", &"g".repeat(32), &"0".repeat(31), &format!("+{}", "0".repeat(31))] {
        assert_eq!(UnitId::parse(text), None, "{text}");
    }
}

fn some_content() -> impl Strategy<Value = Content> {
    proptest::collection::btree_map(0..PAGES, 0..4u8, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn base_and_delta_are_the_memory(base in some_content(), written in some_content()) {
        let base: Content = base.into_iter().filter(|(_, byte)| *byte != 0).collect();
        let mut expected = base.clone();
        expected.extend(&written);
        expected.retain(|_, byte| *byte != 0);

        let dir = tempfile::tempdir().unwrap();
        let (unit, base_unit) = (UnitId::random().unwrap(), UnitId::random().unwrap());
        let base = memory_file(&dir.path().join("base"), &base, &base_unit);
        let writes: Vec<(u64, u8)> = written.into_iter().collect();
        let guest = Guest::new(&base, BYTES, &writes);
        let runs = guest.memory.written().unwrap();
        prop_assert_eq!(crate::memory::bytes_of(&runs), writes.len() as u64 * PAGE);
        let named = |name: &str| create(&dir.path().join(name), None).unwrap();
        let (delta, full, merged) = (named("delta"), named("full"), named("merged"));
        write_delta(&guest.memory, &runs, &base, (&unit, &base_unit), &delta).unwrap();
        let delta = Delta::open(delta, &unit, &base_unit, BYTES).unwrap();
        write_full(&base, &guest.memory, &runs, &unit, &full).unwrap();
        merge(&base, &delta, &unit, &merged).unwrap();
        for file in [&full, &merged] {
            prop_assert_eq!(&content_of(file, 0), &expected);
            prop_assert!(pages_in(file) <= expected.len() as u64);
            prop_assert!(seal::check(file, Kind::Memory, BYTES, &unit).is_ok());
        }
        // A fork of it, and the fork's own delta.
        let fork = Guest::new(&base, BYTES, &[]);
        fork.memory.copy_in(&delta).unwrap();
        let (again, runs) = (named("again"), fork.memory.written().unwrap());
        write_full(&base, &fork.memory, &runs, &unit, &again).unwrap();
        prop_assert_eq!(&content_of(&again, 0), &expected);
    }
}
