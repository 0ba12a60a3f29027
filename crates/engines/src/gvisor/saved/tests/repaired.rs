//! What is saved wrongly is put right in place, and nothing else is touched.

use std::fs;
use std::path::Path;

use super::super::{CHECKPOINT, HASH_BYTES, MARK, graphs, kernel, repair};
use super::encoder::{Bytes, Encoder, map, pointer, uint};

const INTEREST: &str = "pkg/sentry/vfs.epollInterest";
const CONNECTION: &str = "pkg/tcpip/transport/tcp.Endpoint";
/// Two bytes as it is written.
const MASK: u64 = 0x2019;

/// A kernel with a list that knows the first of two interests, and connections in these states.
fn forge(states: &[u64]) -> Bytes {
    let mut encoder = Encoder::default();
    let root = encoder.structure("pkg/sentry/kernel.Kernel", &[("vfs", uint(0))]);
    encoder.object(root);
    let list = encoder.reserve();
    let interest = |encoder: &mut Encoder| {
        let fields = [("epoll", pointer(list)), ("mask", uint(MASK)), ("readySeq", uint(300))];
        let interest = encoder.structure(INTEREST, &fields);
        encoder.object(interest)
    };
    let (known, _left) = (interest(&mut encoder), interest(&mut encoder));
    let interests = encoder.object(map(&[(uint(5), pointer(known))]));
    let fields = [("interest", pointer(interests)), ("ready", uint(1))];
    let value = encoder.structure("pkg/sentry/vfs.EpollInstance", &fields);
    encoder.put(list, value);
    for state in states {
        let fields = [("txHash", uint(77)), ("state", uint(*state))];
        let connection = encoder.structure(CONNECTION, &fields);
        encoder.object(connection);
    }
    encoder.stream()
}

/// What stands before the graphs.
fn head() -> Bytes {
    let about = br#"{"compression":"none"}"#;
    let mut bytes = MARK.to_vec();
    bytes.extend((about.len() as u64).to_be_bytes());
    bytes.extend(about);
    bytes
}

/// In pieces of three bytes, so that numbers are torn apart.
fn write(dir: &Path, graph: &[u8]) -> Bytes {
    let mut bytes = head();
    bytes.extend([7; HASH_BYTES]);
    for piece in graph.chunks(3) {
        bytes.extend(u32::try_from(piece.len()).unwrap().to_be_bytes());
        bytes.extend(piece);
    }
    fs::write(dir.join(CHECKPOINT), &bytes).unwrap();
    bytes
}

fn all(dir: &Path, of: &str, field: &str) -> Vec<u64> {
    let bytes = graphs(fs::File::open(dir.join(CHECKPOINT)).unwrap()).unwrap();
    let kernel = kernel(&bytes).unwrap();
    kernel.numbers(of).map(|object| kernel.object(object).unwrap().uint(field).unwrap()).collect()
}

#[test]
fn an_interest_that_no_list_knows_waits_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &forge(&[]));
    assert_eq!(repair::repair(dir.path()).unwrap(), 1);
    assert_eq!(all(dir.path(), INTEREST, "mask"), [MASK, 0]);
    assert_eq!(all(dir.path(), INTEREST, "readySeq"), [300, 300]);
}

#[test]
fn connections_that_are_being_made_are_put_back_and_those_that_ended_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &forge(&[1, 2, 3, 14, 10, 7, 6]));
    repair::repair(dir.path()).unwrap();
    assert_eq!(all(dir.path(), CONNECTION, "state"), [1, 13, 7, 13, 10, 7, 7]);
    assert_eq!(all(dir.path(), CONNECTION, "txHash"), [77; 7]);
}

#[test]
fn a_save_of_2026_which_has_no_pieces_is_put_right_but_for_its_connections() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(CHECKPOINT), [head(), forge(&[2, 6])].concat()).unwrap();
    assert_eq!(repair::repair(dir.path()).unwrap(), 1);
    assert_eq!(all(dir.path(), INTEREST, "mask"), [MASK, 0]);
    assert_eq!(all(dir.path(), CONNECTION, "state"), [2, 6]);
}

#[test]
fn a_save_that_is_right_or_unreadable_is_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &forge(&[2]));
    repair::repair(dir.path()).unwrap();
    let right = fs::read(dir.path().join(CHECKPOINT)).unwrap();
    repair::repair(dir.path()).unwrap();
    assert_eq!(fs::read(dir.path().join(CHECKPOINT)).unwrap(), right);
    let graph = forge(&[2]);
    let cut = write(dir.path(), &graph[..graph.len() - 2]);
    assert!(repair::repair(dir.path()).is_err());
    assert_eq!(fs::read(dir.path().join(CHECKPOINT)).unwrap(), cut);
}
