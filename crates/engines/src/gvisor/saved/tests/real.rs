//! What is read from a real save is what the guest itself sees, and damage does no harm.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use torpor_lifecycle::engine::{Change, ChangeKind, Changes, See};

use super::super::{find, graphs, read};
use super::machine::Saved;

/// Everything there is to know about a path, as `find` tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    /// `f`, `d`, `l`, `p`, `c`, `b`, `s`.
    kind: u8,
    mode: u32,
    uid: u32,
    gid: u32,
    modified_at_ms: i64,
    /// Size and hash of a file, target of a link.
    content: String,
    /// The first path of the same inode.
    first: Vec<u8>,
}

type Tree = BTreeMap<Vec<u8>, Seen>;

/// Tells all about the directory it is in, for [`tree`]. Mounts are left out.
const TELL: &str = r"
    find . -mindepth 1 \( -path ./proc -o -path ./dev -o -path ./sys \) -prune -o \
        -printf '%P\0%y\0%m\0%U\0%G\0%T@\0%s\0%l\0%D:%i\0'
    printf '\0'
    find . \( -path ./proc -o -path ./dev -o -path ./sys \) -prune -o -type f -exec sha256sum -z {} +
";

/// What [`TELL`] told.
fn tree(told: &[u8]) -> Tree {
    let mut words = told.split(|byte| *byte == 0);
    let mut word = || words.next().expect("a word").to_vec();
    let text = |word: Vec<u8>| String::from_utf8(word).unwrap();
    let (mut tree, mut inodes) = (Tree::new(), BTreeMap::<_, Vec<Vec<u8>>>::new());
    loop {
        let path = word();
        if path.is_empty() {
            break;
        }
        let kind = word()[0];
        let mode = u32::from_str_radix(&text(word()), 8).unwrap();
        let (uid, gid) = (text(word()).parse().unwrap(), text(word()).parse().unwrap());
        let (seconds, rest) = text(word()).split_once('.').map(owned).unwrap();
        let modified_at_ms =
            seconds.parse::<i64>().unwrap() * 1000 + rest[..3].parse::<i64>().unwrap();
        let (size, target, inode) = (text(word()), text(word()), word());
        let content = match kind {
            b'f' => size,
            b'l' => target,
            _ => String::new(),
        };
        inodes.entry(inode).or_default().push(path.clone());
        let first = path.clone();
        tree.insert(path, Seen { kind, mode, uid, gid, modified_at_ms, content, first });
    }
    for hash in words.filter(|word| word.len() > 64) {
        // `<hash>  ./<path>`
        let seen = tree.get_mut(&hash[68..]).expect("a listed file");
        seen.content = format!("{} {}", seen.content, str::from_utf8(&hash[..64]).unwrap());
    }
    for mut paths in inodes.into_values() {
        paths.sort();
        for path in &paths {
            tree.get_mut(path).unwrap().first = paths[0].clone();
        }
    }
    tree
}

fn owned((a, b): (&str, &str)) -> (String, String) {
    (a.to_owned(), b.to_owned())
}

/// The tree after `changes`.
fn apply(tree: &mut Tree, changes: &impl Changes) {
    let hashes = hashes(changes);
    for (index, change) in changes.entries().iter().enumerate() {
        let Change { path, kind, mode, uid, gid, modified_at_ms } = change.clone();
        let mut first = path.clone();
        let (letter, content) = match kind {
            ChangeKind::Directory { opaque } => {
                if opaque || tree.get(&path).is_some_and(|seen| seen.kind != b'd') {
                    remove(tree, &path);
                }
                (b'd', String::new())
            }
            ChangeKind::File { size } => (b'f', format!("{size} {}", hashes[&index])),
            ChangeKind::Symlink { target } => (b'l', String::from_utf8(target).unwrap()),
            ChangeKind::HardLink { to } => {
                first = to;
                (tree[&first].kind, tree[&first].content.clone())
            }
            ChangeKind::Fifo => (b'p', String::new()),
            ChangeKind::Socket => (b's', String::new()),
            ChangeKind::CharDevice { .. } => (b'c', String::new()),
            ChangeKind::BlockDevice { .. } => (b'b', String::new()),
            ChangeKind::Removed => {
                remove(tree, &path);
                continue;
            }
        };
        if letter != b'd' {
            remove(tree, &path);
        }
        tree.insert(path, Seen { kind: letter, mode, uid, gid, modified_at_ms, content, first });
    }
}

fn remove(tree: &mut Tree, path: &[u8]) {
    let below = [path, b"/"].concat();
    tree.retain(|other, _| other != path && !other.starts_with(&below));
}

/// SHA-256 of every file, by its index.
fn hashes(changes: &impl Changes) -> BTreeMap<usize, String> {
    let dir = tempfile::tempdir().unwrap();
    for (index, change) in changes.entries().iter().enumerate() {
        if let ChangeKind::File { size } = change.kind {
            let mut file = fs::File::create(dir.path().join(index.to_string())).unwrap();
            changes.copy(index, &mut file).unwrap();
            assert_eq!(file.metadata().unwrap().len(), size);
        }
    }
    let script = "find . -type f -exec sha256sum {} +";
    let output = Command::new("sh").args(["-c", script]).current_dir(&dir).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |line: &str| (line[68..].parse().unwrap(), line[..64].to_owned());
    text.lines().map(line).collect()
}

/// An image with something to change.
fn plant(tree: &Path) {
    for dir in ["dir", "dir/deep", "gone/deep", "again", "old/deep", "swap"] {
        let at = tree.join("image").join(dir);
        fs::create_dir_all(&at).unwrap();
        for name in ["one", "two"] {
            fs::write(at.join(name), format!("{dir}/{name}\n")).unwrap();
        }
    }
    for name in ["keep", "append", "cut", "rm", "mode", "owner", "linked", "overwritten", "time"] {
        fs::write(tree.join("image").join(name), name.repeat(1000)).unwrap();
    }
    std::os::unix::fs::symlink("keep", tree.join("image/link")).unwrap();
}

const EVERYTHING: &str = r"
    cd /image
    echo more >> append; truncate -s 100 cut; rm rm; chmod 4711 mode; chown 12:345 owner
    ln linked linked2; ln linked linked0; echo new > overwritten.tmp; mv overwritten.tmp overwritten
    touch -d '1999-12-31 23:59:59.123' time
    touch dir/deep/touched; rm dir/one; rm -r gone
    rm -r again; mkdir again; echo fresh > again/three; mkdir again/deeper; echo x > again/deeper/x
    mv old renamed; rm -r swap; echo file > swap
    rm link; ln -s /nowhere/at/all link; mv keep kept
    mkdir /new; cd /new
    : > empty; mkdir -p a/b/c; chmod 1777 a/b; ln -s ../empty a/link; mkfifo -m 600 fifo
    mknod zero c 1 5; chown -h 5:6 a/link
    echo content > file; ln file file2; ln file a/file3; chmod 640 file2
    truncate -s 5000000 sparse; printf end | dd of=sparse bs=1 seek=3000000 conv=notrunc status=none
    head -c 3000000 /dev/zero > zeros; head -c 3000000 /dev/urandom > half; truncate -s 1000001 half
    truncate -s 4000000 half
    head -c 20971520 /dev/urandom > large
    echo x > $'new\nline'; echo y > $'not\xff\xfeunicode'; echo z > 'späß ☃ 文'; echo w > ' space '
    echo v > 'back\slash'; mkdir -- '-dash'; echo u > '-dash/.wh.forged'; echo t > $'tab\t\x01'
    mkdir many; for i in {1..1000}; do echo $i > many/$i; done
    mkdir made; echo x > made/x; rm made/x; rm -r made
    echo hidden > /dev/shm/hidden; mkdir -p moved/from; echo m > moved/from/m; mv moved/from to
    bash -c 'exec 7> open; rm open; echo lost >&7; : > /dev/shm/done; exec sleep infinity' \
        < /dev/null > /dev/null 2>&1 &
    until [ -e /dev/shm/done ]; do :; done
    cd /
";

/// After the machine was revived.
const AND_MORE: &str = r"
    cd /new
    echo revived > revived; echo more >> file; rm empty many/7; mv large a/large; truncate -s 9 half
    printf x | dd of=a/large bs=1 seek=10000000 conv=notrunc status=none
    rm -r /image/again; mv /image/dir/deep /image/again; echo back > /image/rm
    cd /
";

fn told_by_host(dir: &Path) -> Tree {
    let output = Command::new("bash").args(["-c", TELL]).current_dir(dir).output().unwrap();
    tree(&output.stdout)
}

/// Compares what is read from the save with what the guest told.
fn compare(saved: &Saved) {
    let changes = read(&saved.save()).unwrap();
    let mut ours = told_by_host(&saved.tree());
    apply(&mut ours, &changes);
    let guests = tree(&saved.said);
    assert!(guests.len() > 1050, "the guest told of {} files", guests.len());
    for (path, seen) in &guests {
        assert_eq!(ours.get(path), Some(seen), "{}", String::from_utf8_lossy(path));
    }
    let extra: Vec<_> = ours.keys().filter(|path| !guests.contains_key(*path)).collect();
    assert!(extra.is_empty(), "{extra:?}");
}

#[test]
fn the_files_of_a_saved_machine_are_those_the_guest_sees() {
    let Some(mut saved) = Saved::new(plant, &format!("{EVERYTHING}{TELL}")) else { return };
    compare(&saved);
    saved.again(&format!("{AND_MORE}{TELL}"));
    compare(&saved);
}

#[test]
fn entries_are_in_order_and_only_of_the_root() {
    let Some(saved) = Saved::new(plant, EVERYTHING) else { return };
    let changes = read(&saved.save()).unwrap();
    let entries = changes.entries();
    assert!(entries.is_sorted_by(|a, b| a.path < b.path));
    let kind = |path: &str| {
        let found = entries.iter().find(|entry| entry.path == path.as_bytes());
        found.map(|entry| entry.kind.clone())
    };
    assert_eq!(kind("image"), Some(ChangeKind::Directory { opaque: false }));
    assert_eq!(kind("image/again"), Some(ChangeKind::Directory { opaque: true }));
    assert_eq!(kind("image/gone"), Some(ChangeKind::Removed));
    assert_eq!(kind("image/old"), Some(ChangeKind::Removed));
    assert_eq!(kind("new/open"), None, "removed while open, in a new directory");
    assert_eq!(kind("new/zero"), Some(ChangeKind::CharDevice { major: 1, minor: 5 }));
    assert_eq!(kind("new/file2"), Some(ChangeKind::HardLink { to: b"new/a/file3".to_vec() }));
    for absent in ["dev", "dev/shm/hidden", "proc", "image/dir/two", "bin"] {
        assert_eq!(kind(absent), None, "{absent}");
    }
    let link = entries.iter().position(|entry| entry.path == b"new/file2").unwrap();
    assert!(changes.copy(link, &mut Vec::new()).is_err(), "only files have content");
}

#[test]
fn of_a_file_longer_than_its_disk_only_the_data_is_read() {
    let script =
        "truncate -s 30G /a /b; echo middle | dd of=/b bs=1 seek=20G conv=notrunc status=none";
    let Some(saved) = Saved::new(plant, script) else { return };
    let changes = read(&saved.save()).unwrap();
    let data = |path: &[u8]| {
        let index = changes.entries().iter().position(|entry| entry.path == path).unwrap();
        assert_eq!(changes.entries()[index].kind, ChangeKind::File { size: 30 << 30 });
        let mut found = Vec::new();
        let see: See<'_> = &mut |at, piece| {
            found.push((at, piece.to_vec()));
            Ok(())
        };
        changes.read(index, see).unwrap();
        (changes.data(index).unwrap(), found)
    };
    assert_eq!(data(b"a"), (Vec::new(), Vec::new()));
    let (runs, pieces) = data(b"b");
    assert_eq!((runs.len(), &runs[0]), (1, &(20 << 30..(20 << 30) + 4096)));
    assert_eq!((pieces.len(), &pieces[0].1[..8]), (1, &b"middle\n\0"[..]));
}

/// The environment of [`survives_damage`]'s second run: where the save is.
const DAMAGE: &str = "TORPOR_TEST_DAMAGED_SAVE";
/// Memory that the second run may have, in KiB: a save of two megabytes must not need much.
const ROOM_KIB: u32 = 768 * 1024;

#[test]
fn damage_is_an_error_or_another_answer_but_no_harm() {
    if let Some(save) = std::env::var_os(DAMAGE) {
        return survives_damage(Path::new(&save));
    }
    let script = "mkdir /d; echo x > /d/f; ln /d/f /d/g; rm /image/rm";
    let Some(saved) = Saved::new(plant, script) else { return };
    // Again in a process of its own, whose memory is bounded.
    let name = std::thread::current().name().expect("the test's name").to_owned();
    let me = std::env::current_exe().unwrap();
    let mut limited = Command::new("sh");
    let again = format!("ulimit -v {ROOM_KIB}; exec \"$@\"");
    limited.args(["-c", &again, "sh"]).arg(me).args(["--exact", &name, "--nocapture"]);
    let output = limited.env(DAMAGE, saved.save()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

/// Damages the save at many places.
fn survives_damage(save: &Path) {
    let checkpoint = fs::read(save.join("checkpoint.img")).unwrap();
    let meta = fs::read(save.join("pages_meta.img")).unwrap();
    let pages = fs::metadata(save.join("pages.img")).unwrap().len();
    let whole = graphs(&checkpoint[..]).unwrap();
    assert!(find(&whole, &meta, pages).is_ok(), "it is whole");
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    let (mut refused, mut answered) = (0, 0);
    let mut count = |ok: bool| if ok { answered += 1 } else { refused += 1 };
    for round in 0..1500 {
        let (mut graphs, mut meta) = (whole.clone(), meta.clone());
        let target = if round % 3 == 0 { &mut meta } else { &mut graphs };
        for _ in 0..=round % 4 {
            let at = next(target.len());
            target[at] = [0, 0xff, 0x80, 1, next(256) as u8][next(5)];
        }
        count(find(&graphs, &meta, pages).is_ok());
    }
    for _ in 0..150 {
        let (cut, at) = (next(whole.len()), next(meta.len()));
        count(find(&whole[..cut], &meta, pages).is_ok());
        count(find(&whole, &meta[..at], pages).is_ok());
        let mut checkpoint = checkpoint.clone();
        checkpoint.truncate(next(checkpoint.len()));
        count(graphs(&checkpoint[..]).is_ok());
    }
    assert!(refused > 500 && answered > 100, "{refused} refused, {answered} answered");
}
