//! A drive whose files are on another node: whoever calls has a socket to where they are, and no guest.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use torpor_files::{FileService, Volume};
use torpor_lifecycle::guest::FileServer;
use torpor_protocol::guest::files::{
    Answer, Call, Joiner, Lock, Locking, PREFIX, decode_answer, encode_call,
};

use crate::machine::{Machine, files};
use crate::world::{Disk, access, name};

/// The node that has the files: answers what comes, until the other end is gone.
fn home(volume: &Arc<Volume>, mut socket: UnixStream) {
    let service: FileService = volume.attach(Path::new(""), access(false)).unwrap();
    std::thread::spawn(move || {
        let (mut joiner, mut buffer) = (Joiner::default(), [0; 4096]);
        loop {
            let length = socket.read(&mut buffer).unwrap();
            if length == 0 {
                return;
            }
            let mut answers = Vec::new();
            let answer = |message: &[u8]| answers.extend(service.serve(message));
            joiner.push(&buffer[..length], answer).unwrap();
            socket.write_all(&answers).unwrap();
        }
    });
}

/// A node that has not: hands on the bytes of a call, and knows nothing of what they mean.
struct Elsewhere {
    socket: Mutex<UnixStream>,
    turns: Arc<Semaphore>,
}

impl Elsewhere {
    fn new(volume: &Arc<Volume>) -> Arc<Self> {
        let (here, there) = UnixStream::pair().unwrap();
        home(volume, there);
        Arc::new(Self { socket: Mutex::new(here), turns: Arc::new(Semaphore::new(16)) })
    }

    /// As a caller without a guest.
    fn ask(&self, sequence: u64, call: &Call<'_>, look: impl FnOnce(Answer<'_>)) {
        let mut message = Vec::new();
        encode_call(sequence, false, call, &mut message);
        let answer = self.call(&message[PREFIX..]);
        let (to, answer) = decode_answer(&answer[PREFIX..]).unwrap();
        assert_eq!(to, sequence);
        look(answer);
    }
}

impl FileServer for Elsewhere {
    fn call(&self, message: &[u8]) -> Vec<u8> {
        let mut socket = self.socket.lock();
        let length = u32::try_from(message.len()).unwrap().to_le_bytes();
        socket.write_all(&[&length, message].concat()).unwrap();
        let mut prefix = [0; PREFIX];
        socket.read_exact(&mut prefix).unwrap();
        let mut answer = prefix.to_vec();
        answer.resize(PREFIX + u32::from_le_bytes(prefix) as usize, 0);
        socket.read_exact(&mut answer[PREFIX..]).unwrap();
        answer
    }

    fn turns(&self) -> Arc<Semaphore> {
        Arc::clone(&self.turns)
    }
}

#[test]
fn two_nodes_that_hand_calls_on_share_a_drive() {
    let Some(disk) = Disk::new(32) else { return };
    let volume = disk.volume();
    let [one, two] = [(); 2].map(|()| Elsewhere::new(&volume));
    let mut root = None;
    one.ask(1, &Call::Root {}, |answer| match answer {
        Answer::Entry { file, .. } => root = Some(file),
        other => panic!("{other:?}"),
    });
    let root = root.unwrap();
    let owner = crate::world::ROOT;
    let create = Call::Create {
        dir: root,
        name: name("file"),
        owner,
        mode: 0o644,
        exclusive: true,
        truncate: false,
    };
    let mut file = None;
    one.ask(2, &create, |answer| match answer {
        Answer::Entry { file: made, .. } => file = Some(made),
        other => panic!("{other:?}"),
    });
    let file = file.unwrap();
    // A handle is good wherever it is used, also by one who counts the same.
    two.ask(2, &create, |answer| assert_eq!(answer, Answer::Failed { errno: 17 }));
    let data = std::borrow::Cow::Borrowed(&b"of one"[..]);
    let write = Call::Write { file, offset: 0, append: false, strip: false, data: data.clone() };
    one.ask(3, &write, |answer| assert_eq!(answer, Answer::Length { length: 6 }));
    let read = Call::Read { file, offset: 0, length: 100 };
    two.ask(3, &read, |answer| assert_eq!(answer, Answer::Data { data }));
    let lock =
        |kind| Call::Setlk { file, lock: Lock { owner: 1, flock: true, kind, start: 0, end: 0 } };
    one.ask(4, &lock(Locking::Exclusive), |answer| assert_eq!(answer, Answer::Done {}));
    two.ask(4, &lock(Locking::Shared), |answer| assert_eq!(answer, Answer::Failed { errno: 11 }));
    // A node that is gone has no locks.
    drop(one);
    crate::machine::eventually("it is free", || {
        let mut free = None;
        two.ask(5, &lock(Locking::Shared), |answer| {
            free = (answer == Answer::Done {}).then_some(())
        });
        free
    });
}

#[test]
fn machines_of_two_nodes_share_a_drive_of_a_third() {
    let Some(disk) = Disk::new(32) else { return };
    if !Path::new("/dev/fuse").exists() {
        return torpor_testkit::missing("mounts need /dev/fuse");
    }
    let volume = disk.volume();
    let mount =
        |name| torpor_lifecycle::guest::FilesMount { shared: true, ..files(&disk, 1, name) };
    let (mut one, mut two) = (Machine::new(), Machine::new());
    let _one = one.mount_served(mount("one"), Elsewhere::new(&volume));
    let _two = two.mount_served(mount("two"), Elsewhere::new(&volume));
    let (here, there) = (disk.beside("one"), disk.beside("two"));
    for (from, to) in [(&here, &there), (&there, &here)] {
        std::fs::write(from.join("note"), from.to_str().unwrap()).unwrap();
        assert_eq!(std::fs::read_to_string(to.join("note")).unwrap(), from.to_str().unwrap());
    }
    let large: Vec<u8> = (0..1 << 20).map(|number: u32| number.to_le_bytes()[0]).collect();
    std::fs::write(here.join("large"), &large).unwrap();
    assert_eq!(std::fs::read(there.join("large")).unwrap(), large);
    let [first, second] = [&here, &there].map(|dir| std::fs::File::open(dir.join("note")).unwrap());
    let lock = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    rustix::fs::flock(&first, lock).unwrap();
    assert!(rustix::fs::flock(&second, lock).is_err());
    drop(first);
    crate::machine::eventually("it is free", || rustix::fs::flock(&second, lock).ok());
}
