//! Paths, locks and what is refused as a data directory.

use super::*;

#[test]
fn a_data_directory_is_closed_to_others_unless_it_is_not_ours() {
    let mode = |dir: &Path| rustix::fs::stat(dir).unwrap().st_mode & 0o777;
    let open = Mode::from_raw_mode(0o777);
    let dir = tempfile::tempdir().unwrap();
    rustix::fs::chmod(dir.path(), open).unwrap();
    drop(Layout::open(dir.path()).unwrap());
    assert_eq!(mode(dir.path()), 0o755);
    let foreign = tempfile::tempdir().unwrap();
    std::fs::write(foreign.path().join("thesis"), "x").unwrap();
    rustix::fs::chmod(foreign.path(), open).unwrap();
    Layout::open(foreign.path()).unwrap_err();
    assert_eq!(mode(foreign.path()), 0o777);
}

#[test]
fn a_second_daemon_is_told_who_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let first = Layout::open(dir.path()).unwrap();
    let error = Layout::open(dir.path()).unwrap_err().to_string();
    let who = format!("another daemon (pid {}) uses this data directory", std::process::id());
    assert!(error.contains(&who), "{error}");
    assert_eq!(Layout::user(dir.path()), Some(std::process::id()));
    drop(first);
    assert_eq!(Layout::user(dir.path()), None);
    Layout::open(dir.path()).unwrap();
}

#[test]
fn a_newer_format_is_refused_and_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("VERSION"), "2\n").unwrap();
    std::fs::create_dir(dir.path().join("staging")).unwrap();
    std::fs::write(dir.path().join("staging/x"), "x").unwrap();
    let error = Layout::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("has format 2, this program knows up to 1"), "{error}");
    assert!(dir.path().join("staging/x").exists());
    assert!(!dir.path().join("lock").exists());
}

#[test]
fn a_directory_of_somebody_else_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("staging")).unwrap();
    std::fs::write(dir.path().join("staging/thesis"), "x").unwrap();
    let error = Layout::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("not a data directory of torpor"), "{error}");
    assert!(dir.path().join("staging/thesis").exists());
}

#[test]
fn garbage_in_the_version_file_is_refused() {
    for text in ["", "one", "-1", "0", "99999999999999999999"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("VERSION"), text).unwrap();
        assert!(Layout::open(dir.path()).is_err(), "{text:?}");
    }
}

#[test]
fn a_crash_before_the_version_was_written_is_no_obstacle() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("lock"), "1\n").unwrap();
    Layout::open(dir.path()).unwrap();
}

#[test]
fn a_kernel_that_came_before_the_first_daemon_is_no_obstacle_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = Layout::kernels_in(dir.path()).join("6.1.0-x");
    std::fs::create_dir_all(&kernel).unwrap();
    Layout::open(dir.path()).unwrap();
    assert!(kernel.exists());
}

#[test]
fn staging_is_emptied_at_start_without_following_links() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("precious"), "x").unwrap();
    let dir = tempfile::tempdir().unwrap();
    drop(Layout::open(dir.path()).unwrap());
    let work = dir.path().join("staging/half/deep");
    std::fs::create_dir_all(&work).unwrap();
    std::fs::write(work.join("file"), "x").unwrap();
    std::os::unix::fs::symlink(outside.path(), work.join("link")).unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    assert_eq!(std::fs::read_dir(layout.staging()).unwrap().count(), 0);
    assert!(outside.path().join("precious").exists());
}

#[test]
fn a_stage_goes_away_with_its_value() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let stage = layout.stage().unwrap();
    std::fs::create_dir_all(stage.path().join("a/b")).unwrap();
    let path = stage.path().to_owned();
    drop(stage);
    assert!(!path.exists());
}

#[test]
fn the_tag_depends_on_the_place_only() {
    let dir = tempfile::tempdir().unwrap();
    let tag = Layout::open(dir.path()).unwrap().tag().to_owned();
    let again = Layout::open(&dir.path().join(".")).unwrap();
    assert_eq!(tag, again.tag());
    assert_eq!(tag.len(), 8);
    let other = tempfile::tempdir().unwrap();
    assert_ne!(tag, Layout::open(other.path()).unwrap().tag());
}

#[test]
fn a_path_that_is_a_file_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Layout::open(file.path()).unwrap_err().to_string();
    assert!(error.contains("the data directory"), "{error}");
}
