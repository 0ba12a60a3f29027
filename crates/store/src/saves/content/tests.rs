//! Hashes of both forms, and when a file counts as the one that was hashed.

use std::io::Write;

use super::*;

#[test]
fn the_hash_on_all_cores_is_the_plain_one() {
    let part = usize::try_from(PART).unwrap();
    for bytes in [0, 1, 1024, part - 1, part, part + 1, 2 * part, 5 * part + 7, 9 * part] {
        let content: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        assert_eq!(hash(&file, Form::Plain).unwrap().0, blake3::hash(&content), "{bytes}");
    }
}

#[test]
fn a_changed_file_has_another_identity() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    std::fs::write(&path, "one").unwrap();
    let before = Identity::at(&path).unwrap();
    assert_eq!(before, Identity::of(&File::open(&path).unwrap()).unwrap());
    std::fs::rename(&path, dir.path().join("y")).unwrap();
    std::fs::write(&path, "two").unwrap();
    assert_ne!(before, Identity::at(&path).unwrap());
}

#[test]
fn another_name_does_not_make_another_file() {
    let dir = tempfile::tempdir().unwrap();
    let (path, link) = (dir.path().join("x"), dir.path().join("y"));
    std::fs::write(&path, "one").unwrap();
    let before = Identity::at(&path).unwrap();
    std::fs::hard_link(&path, &link).unwrap();
    assert_eq!(before, Identity::at(&link).unwrap());
    std::fs::remove_file(&path).unwrap();
    assert_eq!(before, Identity::at(&link).unwrap());
}

#[test]
fn a_file_with_the_times_of_another_is_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    std::fs::write(&path, "one").unwrap();
    let before = Identity::at(&path).unwrap();
    let modified = path.metadata().unwrap().modified().unwrap();
    // Whatever inode it gets: many filesystems take the one that was just given back.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "two").unwrap();
    File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    assert_eq!(path.metadata().unwrap().modified().unwrap(), modified);
    assert_ne!(before, Identity::at(&path).unwrap());
}

#[test]
fn holes_are_hashed_as_zeros() {
    let part = usize::try_from(PART).unwrap();
    for (bytes, written) in [
        (0, vec![]),
        (part, vec![]),
        (3 * part + 5, vec![]),
        (3 * part, vec![0, part + 70_000, 3 * part - 100]),
        (5 * part + 4096, vec![2 * part - 50, 5 * part]),
        (100_000, vec![50_000]),
    ] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes as u64).unwrap();
        let mut content = vec![0; bytes];
        for at in written {
            content[at..at + 100].fill(7);
            file.write_all_at(&[7; 100], at as u64).unwrap();
        }
        assert_eq!(hash(&file, Form::Plain).unwrap().0, blake3::hash(&content), "{bytes}");
    }
}

#[test]
fn a_large_file_is_read_once_whatever_its_names_are() {
    let dir = tempfile::tempdir().unwrap();
    let (path, link) = (dir.path().join("x"), dir.path().join("y"));
    let content = vec![7; usize::try_from(REMEMBERED_MIN).unwrap()];
    std::fs::write(&path, &content).unwrap();
    let modified = path.metadata().unwrap().modified().unwrap();
    let hashes = Hashes::default();
    let expected = blake3::hash(&content);
    assert_eq!(hashes.of(&open(&path).unwrap(), Form::Plain).unwrap().0.hash, expected);
    std::fs::hard_link(&path, &link).unwrap();
    // What can't be seen from outside is not looked for, unless it is asked for.
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"x", 5).unwrap();
    file.set_modified(modified).unwrap();
    let file = open(&link).unwrap();
    assert_eq!(hashes.of(&file, Form::Plain).unwrap().0.hash, expected, "it was not read again");
    assert_ne!(hashes.read(&file, Form::Plain).unwrap().0.hash, expected);
    assert_ne!(hashes.of(&file, Form::Plain).unwrap().0.hash, expected, "the last word counts");
}

#[test]
fn what_was_not_used_for_long_is_forgotten_first() {
    let (dir, mut remembered) = (tempfile::tempdir().unwrap(), Remembered::default());
    std::fs::write(dir.path().join("x"), "").unwrap();
    let some = Identity::at(&dir.path().join("x")).unwrap();
    let numbered = |number| (Identity { bytes: number, ..some }, Form::Plain);
    for number in 0..REMEMBERED_MAX as u64 {
        remembered.insert(numbered(number), blake3::hash(b""));
    }
    remembered.insert(numbered(0), blake3::hash(b"again"));
    assert_eq!(remembered.hashes.len(), REMEMBERED_MAX);
    remembered.insert(numbered(u64::MAX), blake3::hash(b""));
    assert_eq!(remembered.hashes.len(), REMEMBERED_MAX);
    assert!(remembered.hashes.contains_key(&numbered(0)));
    assert!(!remembered.hashes.contains_key(&numbered(1)));
}

#[test]
fn a_link_or_a_directory_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
    assert!(open(&dir.path().join("link")).is_err());
    assert!(open(dir.path()).is_err());
}
