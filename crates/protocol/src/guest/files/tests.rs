//! Whatever is said survives the wire, and whatever is sent is a message or an error.

use proptest::prelude::*;

use super::*;

fn handle() -> impl Strategy<Value = Handle> {
    proptest::collection::vec(any::<u8>(), 0..=HANDLE_MAX)
        .prop_map(|bytes| Handle::new(&bytes).unwrap())
}

fn name() -> impl Strategy<Value = Name<'static>> {
    proptest::collection::vec(any::<u8>(), 1..=NAME_MAX)
        .prop_filter_map("no name", |bytes| Name::new(bytes).ok())
}

fn owner() -> impl Strategy<Value = Owner> {
    any::<(u32, u32)>().prop_map(|(user, group)| Owner { user, group })
}

fn data() -> impl Strategy<Value = Cow<'static, [u8]>> {
    proptest::collection::vec(any::<u8>(), 0..5000).prop_map(Cow::Owned)
}

fn time() -> impl Strategy<Value = Time> {
    any::<(i64, u32)>().prop_map(|(seconds, nanoseconds)| Time { seconds, nanoseconds })
}

fn change() -> impl Strategy<Value = Change> {
    let numbers = any::<(Option<u32>, Option<u32>, Option<u32>, Option<u64>, bool)>();
    let times = (proptest::option::of(time()), proptest::option::of(time()));
    (numbers, times).prop_map(|((mode, user, group, size, strip), (accessed, modified))| Change {
        mode,
        user,
        group,
        size,
        accessed,
        modified,
        strip,
    })
}

fn attributes() -> impl Strategy<Value = Attributes> {
    (any::<(u64, u64, u64, u32, u32, u32)>(), owner(), time(), time(), time()).prop_map(
        |((inode, size, blocks, mode, links, block_size), owner, accessed, modified, changed)| {
            Attributes {
                inode,
                size,
                blocks,
                mode,
                links,
                owner,
                block_size,
                accessed,
                modified,
                changed,
            }
        },
    )
}

fn lock() -> impl Strategy<Value = Lock> {
    (any::<(u64, bool, u64, u64)>(), 0..3).prop_map(|((owner, flock, start, end), kind)| {
        let kind = [Locking::Unlocked, Locking::Shared, Locking::Exclusive][kind as usize];
        Lock { owner, flock, kind, start, end }
    })
}

fn call() -> impl Strategy<Value = Call<'static>> {
    prop_oneof![
        Just(Call::Root {}),
        (handle(), name()).prop_map(|(dir, name)| Call::Lookup { dir, name }),
        (handle(), change()).prop_map(|(file, change)| Call::Setattr { file, change }),
        (handle(), name(), owner(), data()).prop_map(|(dir, name, owner, target)| Call::Symlink {
            dir,
            name,
            owner,
            target
        }),
        (handle(), name(), handle(), name(), any::<bool>()).prop_map(
            |(dir, name, to, to_name, keep)| {
                let how = if keep { Renaming::Exchange } else { Renaming::NoReplace };
                Call::Rename { dir, name, to, to_name, how, keep }
            }
        ),
        (handle(), any::<(u64, bool, bool)>(), data()).prop_map(
            |(file, (offset, append, strip), data)| Call::Write {
                file,
                offset,
                append,
                strip,
                data
            }
        ),
        (handle(), lock()).prop_map(|(file, lock)| Call::Setlk { file, lock }),
    ]
}

fn answer() -> impl Strategy<Value = Answer<'static>> {
    let entry = (any::<u64>(), name(), handle(), attributes())
        .prop_map(|(cookie, name, file, attributes)| Entry { cookie, name, file, attributes });
    prop_oneof![
        any::<u32>().prop_map(|errno| Answer::Failed { errno }),
        (handle(), attributes()).prop_map(|(file, attributes)| Answer::Entry { file, attributes }),
        data().prop_map(|data| Answer::Data { data }),
        (any::<bool>(), proptest::collection::vec(entry, 0..20))
            .prop_map(|(end, entries)| Answer::Entries { end, entries }),
        proptest::option::of(lock()).prop_map(|lock| Answer::Lock { lock }),
        proptest::option::of(handle()).prop_map(|kept| Answer::Removed { kept }),
    ]
}

proptest! {
    #[test]
    fn calls_survive_the_wire_however_it_is_cut(
        calls in proptest::collection::vec((any::<u64>(), any::<bool>(), call()), 1..8),
        piece in 1usize..3000,
    ) {
        let mut sent = Vec::new();
        for (sequence, again, call) in &calls {
            encode_call(*sequence, *again, call, &mut sent);
        }
        let (mut joiner, mut messages) = (Joiner::default(), Vec::new());
        for piece in sent.chunks(piece) {
            joiner.push(piece, |message| messages.push(message.to_vec())).unwrap();
        }
        let taken: Vec<_> = messages.iter().map(|it| decode_call(it).unwrap()).collect();
        prop_assert_eq!(taken, calls);
    }

    #[test]
    fn answers_survive_the_wire(sequence: u64, answer in answer()) {
        let mut sent = Vec::new();
        encode_answer(sequence, &answer, &mut sent);
        prop_assert_eq!(decode_answer(&sent[PREFIX..]).unwrap(), (sequence, answer));
    }

    #[test]
    fn whatever_is_sent_is_a_message_or_an_error(
        bytes in proptest::collection::vec(any::<u8>(), 0..300)
    ) {
        let _ = decode_call(&bytes);
        let _ = decode_answer(&bytes);
        let _ = Joiner::default().push(&bytes, |message| {
            let _ = decode_call(message);
        });
    }
}

#[test]
fn a_call_that_is_marked_is_the_same_but_for_the_mark() {
    let mut sent = Vec::new();
    encode_call(7, false, &Call::Root {}, &mut sent);
    mark_again(&mut sent);
    assert_eq!(decode_call(&sent[PREFIX..]), Ok((7, true, Call::Root {})));
}

#[test]
fn no_name_leads_out_of_its_directory() {
    for bad in ["", ".", "..", "a/b", "/", "a\0"] {
        assert_eq!(Name::new(bad.as_bytes()), Err(BadMessage::Name), "{bad:?}");
    }
    assert_eq!(Name::new(vec![b'a'; NAME_MAX + 1]), Err(BadMessage::Name));
    for good in ["...", "..a", " ", "\u{e9}"] {
        assert!(Name::new(good.as_bytes()).is_ok());
    }
}

#[test]
fn a_message_that_says_it_is_larger_than_any_is_refused_at_once() {
    let prefix = u32::try_from(MESSAGE_MAX + 1).unwrap().to_le_bytes();
    let refused = Joiner::default().push(&prefix, |_| panic!("it is no message"));
    assert_eq!(refused, Err(BadMessage::Size(MESSAGE_MAX + 1)));
}

#[test]
fn the_largest_of_everything_fits_into_a_message() {
    let handle = Handle::new(&[7; HANDLE_MAX]).unwrap();
    let name = Name::new(vec![b'n'; NAME_MAX]).unwrap();
    let value = Cow::Owned(vec![0; DATA_MAX]);
    let mut sent = Vec::new();
    let call = Call::Setxattr { file: handle, name, how: Replacing::Either, value };
    encode_call(u64::MAX, true, &call, &mut sent);
    assert!(sent.len() - PREFIX <= MESSAGE_MAX);
}
