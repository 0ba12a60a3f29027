//! Hashes of both forms, and when a file counts as the one that was hashed.

use std::io::Write;

use proptest::prelude::*;

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

// === The sparse form ===

fn sparse(file: &File) -> Hash {
    hash(file, Form::Sparse).unwrap().0
}

/// Of a content that is in memory, fed in pieces of so many blocks.
fn passed(form: Form, content: &[u8], blocks: usize) -> Hash {
    let mut hasher = StreamHasher::new(form, content.len() as u64);
    for (index, piece) in content.chunks(blocks * BLOCK).enumerate() {
        hasher.feed((index * blocks * BLOCK) as u64, piece);
    }
    hasher.finish().hash
}

/// What somebody wrote into a file, and how much of the zeros of it.
#[derive(Debug, Clone)]
struct Written {
    bytes: usize,
    /// Places and values.
    marks: Vec<(usize, u8)>,
}

impl Written {
    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; self.bytes];
        self.marks.iter().for_each(|(at, value)| content[*at] = *value);
        content
    }

    /// With holes at most where they can be, and zeros written at some places.
    fn file(&self, zeros: &[usize]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(self.bytes as u64).unwrap();
        for at in zeros.iter().map(|at| at % self.bytes) {
            let most = (self.bytes - at).min(100_000);
            file.write_all_at(&vec![0; most], at as u64).unwrap();
        }
        for (at, value) in &self.marks {
            file.write_all_at(&[*value], *at as u64).unwrap();
        }
        file
    }
}

/// Two parts and a bit, so that there is a border between parts.
fn written() -> impl Strategy<Value = Written> {
    let whole = 2 * usize::try_from(PART).unwrap() + 10_000;
    (1..whole).prop_flat_map(|bytes| {
        // Some of them zeros: a mark that is none.
        let marks = proptest::collection::vec((0..bytes, 0..3u8), 0..6);
        marks.prop_map(move |marks| Written { bytes, marks })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_same_content_has_the_same_sparse_hash_whatever_its_holes_are(
        written in written(),
        zeros in proptest::collection::vec(any::<usize>(), 0..6),
        blocks in 1..200_usize,
    ) {
        let content = written.content();
        let mut dense = tempfile::tempfile().unwrap();
        dense.write_all(&content).unwrap();
        let expected = sparse(&dense);
        prop_assert_eq!(sparse(&written.file(&[])), expected);
        prop_assert_eq!(sparse(&written.file(&zeros)), expected);
        prop_assert_eq!(passed(Form::Sparse, &content, blocks), expected);
        prop_assert_eq!(passed(Form::Plain, &content, blocks), blake3::hash(&content));
    }

    #[test]
    fn another_content_or_length_has_another_sparse_hash(
        written in written(),
        at in any::<usize>(),
        bit in 0..8_u32,
        longer in 1..10_000_u64,
    ) {
        let file = written.file(&[]);
        let before = sparse(&file);
        let at = at % written.bytes;
        let mut byte = [written.content()[at]];
        byte[0] ^= 1 << bit;
        file.write_all_at(&byte, at as u64).unwrap();
        prop_assert_ne!(sparse(&file), before);
        byte[0] ^= 1 << bit;
        file.write_all_at(&byte, at as u64).unwrap();
        prop_assert_eq!(sparse(&file), before);
        file.set_len(written.bytes as u64 + longer).unwrap();
        prop_assert_ne!(sparse(&file), before);
    }
}

#[test]
fn a_block_that_moved_is_another_content() {
    let part = usize::try_from(PART).unwrap();
    let places = [0, BLOCK, 8 * BLOCK, part - BLOCK, part, part + BLOCK, 2 * part];
    let hashes: std::collections::HashSet<Hash> = places
        .into_iter()
        .map(|at| sparse(&Written { bytes: 3 * part, marks: vec![(at, 1)] }.file(&[])))
        .collect();
    assert_eq!(hashes.len(), places.len());
    assert!(!hashes.contains(&sparse(&Written { bytes: 3 * part, marks: vec![] }.file(&[]))));
}

#[test]
fn the_sparse_hash_is_the_one_of_earlier_versions() {
    let file = Written { bytes: 5 << 20, marks: vec![(70_000, 7), (4 << 20, 9)] }.file(&[]);
    let mut part = Hasher::new_derive_key("torpor sparse file, part, version 1");
    let (mut block, mut map) = ([0; 4096], [0; 128]);
    (block[70_000 % 4096], map[17 / 8]) = (7, 1 << (17 % 8));
    let first = part.update(&block).update(&map).finalize();
    let mut part = Hasher::new_derive_key("torpor sparse file, part, version 1");
    let (mut block, mut map) = ([0; 4096], [0; 128]);
    (block[0], map[0]) = (9, 1);
    let second = part.update(&block).update(&map).finalize();
    let mut whole = Hasher::new_derive_key("torpor sparse file, whole, version 1");
    whole.update(&(5_u64 << 20).to_le_bytes());
    whole.update(&0_u64.to_le_bytes()).update(first.as_bytes());
    whole.update(&1_u64.to_le_bytes()).update(second.as_bytes());
    assert_eq!(sparse(&file), whole.finalize());
}

#[test]
fn files_with_clearly_fewer_blocks_than_bytes_get_the_sparse_form() {
    let form = |bytes: u64, data: usize| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        file.write_all_at(&vec![1; data], 0).unwrap();
        file.sync_all().unwrap();
        Form::suiting(&file.metadata().unwrap())
    };
    assert_eq!(form(10 << 30, 1 << 20), Form::Sparse);
    assert_eq!(form(4 << 20, 2 << 20), Form::Sparse);
    assert_eq!(form(4 << 20, 4 << 20), Form::Plain);
    assert_eq!(form(4 << 20, (4 << 20) - 100_000), Form::Plain, "a few holes are no reason");
    assert_eq!(form(100_000, 0), Form::Plain, "it is small");
}

#[test]
fn both_forms_are_remembered_and_not_taken_for_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.set_len(REMEMBERED_MIN).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let hashes = Hashes::default();
    let forms = [Form::Plain, Form::Sparse];
    let before = forms.map(|form| hashes.of(&file, form).unwrap().0);
    assert_ne!(before[0].hash, before[1].hash);
    file.write_all_at(b"x", 5).unwrap();
    file.set_modified(modified).unwrap();
    assert_eq!(forms.map(|form| hashes.of(&file, form).unwrap().0), before, "not read again");
    hashes.read(&file, Form::Sparse).unwrap();
    let after = forms.map(|form| hashes.of(&file, form).unwrap().0);
    assert_eq!((after[0], after[1] == before[1]), (before[0], false));
}

#[test]
fn a_hash_has_one_text_and_other_texts_are_none() {
    for form in [Form::Plain, Form::Sparse] {
        let digest = Digest { form, hash: blake3::hash(b"x") };
        assert_eq!(digest.to_string().parse(), Ok(digest));
    }
    let digits = blake3::hash(b"x").to_hex().to_string();
    assert_eq!(Digest { form: Form::Plain, hash: blake3::hash(b"x") }.to_string(), digits);
    let none = [
        String::new(),
        "h".to_owned(),
        "sparse:".to_owned(),
        digits.to_uppercase(),
        digits[1..].to_owned(),
        format!("{digits}0"),
        format!("Sparse:{digits}"),
        format!("sparse:sparse:{digits}"),
        format!("sparse:{}", &digits[1..]),
        format!(" {digits}"),
        "é".repeat(1000),
    ];
    for text in none {
        assert!(text.parse::<Digest>().is_err(), "{text}");
    }
}
