//! Layers of any names and any bytes.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use torpor_lifecycle::engine::See;
use torpor_lifecycle::store::LAYER_FILE;

use super::reading::change;
use super::*;

/// Changes without content.
struct Bare(Vec<Change>);

impl Changes for Bare {
    fn entries(&self) -> &[Change] {
        &self.0
    }

    fn data(&self, index: usize) -> io::Result<Vec<Range<u64>>> {
        Ok(std::iter::once(0..self.0[index].path.len() as u64).collect())
    }

    fn read(&self, index: usize, see: See<'_>) -> io::Result<()> {
        see(0, &self.0[index].path)
    }
}

fn open(tar: &[u8]) -> Result<LayerChanges, StoreError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(LAYER_FILE), tar).unwrap();
    LayerChanges::open(dir.path())
}

/// A name that a guest can give.
fn name() -> impl Strategy<Value = Vec<u8>> {
    let any = vec(any::<u8>().prop_filter("no name", |b| *b != 0 && *b != b'/'), 1..130);
    let marked = any.clone().prop_map(|name| [WHITEOUT, &name].concat());
    let real = |name: &Vec<u8>| name != b"." && name != b"..";
    prop_oneof![any.prop_filter("no name", real), marked]
}

fn kind() -> impl Strategy<Value = ChangeKind> {
    prop_oneof![
        Just(ChangeKind::File { size: 0 }),
        vec(1u8..=255, 1..300).prop_map(|target| ChangeKind::Symlink { target }),
        (0u32..4096, 0u32..1 << 20)
            .prop_map(|(major, minor)| ChangeKind::CharDevice { major, minor }),
        Just(ChangeKind::Fifo),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_a_guest_wrote_comes_back(
        made in btree_map(vec(name(), 1..4), (kind(), any::<(u32, u32, i64)>()), 0..12)
    ) {
        let mut changes = Vec::new();
        for (parts, (kind, (uid, gid, time))) in made {
            let path = parts.join(&b'/');
            // Times of a thousand centuries are enough.
            let modified_at_ms = time % (1 << 50);
            let file = matches!(kind, ChangeKind::File { .. });
            let kind = if file { ChangeKind::File { size: path.len() as u64 } } else { kind };
            changes.push(Change { path, kind, mode: uid & 0o7777, uid, gid, modified_at_ms });
        }
        changes.sort_by(|a, b| a.path.cmp(&b.path));
        let file = tempfile::tempdir().unwrap();
        let changes = Bare(changes);
        write_file(&file.path().join(LAYER_FILE), &changes, 1 << 20).unwrap();
        let layer = LayerChanges::open(file.path()).unwrap();
        prop_assert_eq!(layer.entries(), changes.entries());
        for (index, change) in changes.0.iter().enumerate() {
            if matches!(change.kind, ChangeKind::File { .. }) {
                let mut content = Vec::new();
                layer.copy(index, &mut content).unwrap();
                prop_assert_eq!(&content, &change.path);
            }
        }
    }

    #[test]
    fn whatever_bytes_a_layer_has_it_is_read_or_refused(
        at in 0usize..2048, byte: u8, tail in vec(any::<u8>(), 0..600)
    ) {
        let dir = tempfile::tempdir().unwrap();
        let kind = ChangeKind::Directory { opaque: true };
        let made = Bare(vec![change(b"a\n".to_vec(), kind), change(b"b".to_vec(), ChangeKind::Fifo)]);
        write_file(&dir.path().join(LAYER_FILE), &made, 0).unwrap();
        let mut tar = std::fs::read(dir.path().join(LAYER_FILE)).unwrap();
        let at = at % tar.len();
        tar[at] = byte;
        tar.truncate(tar.len() - 1024);
        tar.extend_from_slice(&tail);
        if let Ok(layer) = open(&tar) {
            for index in 0..layer.entries().len() {
                let _ = layer.copy(index, &mut io::sink());
            }
        }
    }
}

#[test]
fn a_socket_is_in_a_layer_under_none_of_its_names() {
    let dir = tempfile::tempdir().unwrap();
    let link = |to: &[u8]| ChangeKind::HardLink { to: to.to_vec() };
    let made = Bare(vec![
        change(b"again".to_vec(), link(b"pipe")),
        change(b"also".to_vec(), link(b"socket")),
        change(b"pipe".to_vec(), ChangeKind::Fifo),
        change(b"socket".to_vec(), ChangeKind::Socket),
    ]);
    write_file(&dir.path().join(LAYER_FILE), &made, 0).unwrap();
    let layer = LayerChanges::open(dir.path()).unwrap();
    let kinds: Vec<_> = layer.entries().iter().map(|c| (&c.path[..], &c.kind)).collect();
    assert_eq!(kinds.len(), 4, "{kinds:?}");
    for (path, kind) in kinds {
        let gone = matches!(kind, ChangeKind::Removed);
        assert_eq!(gone, matches!(path, b"also" | b"socket"), "{path:?} {kind:?}");
    }
}
