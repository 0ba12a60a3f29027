//! What guests are answered when they ask for names.

use std::net::Ipv4Addr;

use hickory_proto::op::{OpCode, ResponseCode};
use hickory_proto::rr::RecordType;
use torpor_protocol::egress::{EgressKind, Verdict};

use crate::world::{World, addresses, question, received};

const PUBLIC: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);

#[tokio::test]
async fn an_allowed_name_is_answered() {
    let world = World::new(r#"{"allow":["a.test"]}"#).await;
    world.host("a.test", &[PUBLIC]);
    let answer = world.guest.ask("A.test.", RecordType::A).await;
    assert_eq!(addresses(&answer), [PUBLIC]);
    assert_eq!(answer.metadata.id, 4711);
    let event = world.event(EgressKind::Name, Verdict::Allowed).await;
    assert_eq!((event.rule.as_str(), event.host.as_deref()), ("a.test", Some("a.test")));
}

#[tokio::test]
async fn a_name_that_is_never_allowed_does_not_leave_the_host() {
    let world = World::new(r#"{"allow":["a.test"],"deny":["evil.a.test"]}"#).await;
    for name in ["stolen-data.evil.test.", "evil.a.test.", "a.test.evil.test.", "."] {
        for kind in [RecordType::A, RecordType::TXT, RecordType::AAAA, RecordType::CNAME] {
            let answer = world.guest.ask(name, kind).await;
            assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain, "{name} {kind}");
            assert!(answer.answers.is_empty());
        }
    }
    assert!(world.asked().is_empty(), "{:?}", world.asked());
    world.event(EgressKind::Name, Verdict::Denied).await;
}

#[tokio::test]
async fn there_is_no_ipv6_and_no_hint_for_quic_or_encrypted_names() {
    let world = World::new("{}").await;
    world.host("a.test", &[PUBLIC]);
    for kind in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB, RecordType::ANY] {
        let answer = world.guest.ask("a.test.", kind).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError, "{kind}");
        assert!(answer.answers.is_empty(), "{kind}");
    }
    assert!(world.asked().is_empty());
}

#[tokio::test]
async fn a_name_does_not_lead_to_a_private_address() {
    let world = World::new(r#"{"allow":["*.test","127.0.0.2"]}"#).await;
    let open = Ipv4Addr::new(127, 0, 0, 2);
    let metadata = Ipv4Addr::new(169, 254, 169, 254);
    world.host("a.test", &[Ipv4Addr::LOCALHOST, PUBLIC, metadata, open]);
    world.host("b.test", &[Ipv4Addr::LOCALHOST, metadata]);
    assert_eq!(addresses(&world.guest.ask("a.test.", RecordType::A).await), [PUBLIC, open]);
    let answer = world.guest.ask("b.test.", RecordType::A).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
    assert!(answer.answers.is_empty());
    assert_eq!(world.event(EgressKind::Name, Verdict::Denied).await.rule, "private");
}

#[tokio::test]
async fn an_answer_that_is_too_long_comes_by_tcp() {
    let world = World::new("{}").await;
    let many: Vec<_> = (1..200).map(|last| Ipv4Addr::new(203, 0, 113, last)).collect();
    world.host("a.test", &many);
    let short = world.guest.ask("a.test.", RecordType::A).await;
    assert!(short.metadata.truncation);
    assert!(short.answers.is_empty());
    let answer = world.guest.ask_by_tcp("a.test.", RecordType::A).await;
    assert_eq!(addresses(&answer), many);
}

#[tokio::test]
async fn a_guest_that_asks_too_much_at_once_waits_for_nobody() {
    let world = World::new("{}").await;
    world.zone.lock().mute.push("mute.test".to_owned());
    let socket = world.guest.name_socket().await;
    let question = question("mute.test.", RecordType::A).to_vec().unwrap();
    for _ in 0..65 {
        socket.send(&question).await.unwrap();
    }
    // Those that wait get the same in the end, but this one comes while they wait and was not asked.
    let answer = received(&socket).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    assert!(world.asked().len() <= 64);
    let others = world.guest.at(Ipv4Addr::new(127, 9, 0, 3));
    world.host("a.test", &[PUBLIC]);
    let id = torpor_protocol::SandboxId::random();
    torpor_lifecycle::engine::GuestRegistry::register(
        &world.egress,
        others.address,
        &id,
        &crate::world::network("{}"),
    );
    assert_eq!(addresses(&others.ask("a.test.", RecordType::A).await), [PUBLIC]);
}

#[tokio::test]
async fn what_is_no_proper_question_is_refused() {
    let world = World::new("{}").await;
    let mut two = question("a.test.", RecordType::A);
    two.add_query(two.queries[0].clone());
    let mut update = question("a.test.", RecordType::A);
    update.metadata.op_code = OpCode::Notify;
    for (message, code) in [
        (two, ResponseCode::FormErr),
        (update, ResponseCode::NotImp),
        (question("a.test.", RecordType::AXFR), ResponseCode::Refused),
    ] {
        let answer = world.guest.ask_bytes(&message.to_vec().unwrap()).await;
        assert_eq!(answer.metadata.response_code, code);
    }
    let mut broken = question("a.test.", RecordType::A).to_vec().unwrap();
    broken.truncate(15);
    let answer = world.guest.ask_bytes(&broken).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::FormErr);
    assert!(world.asked().is_empty());
}

#[tokio::test]
async fn who_is_not_registered_gets_no_answer() {
    let world = World::new("{}").await;
    world.host("a.test", &[PUBLIC]);
    let stranger = world.guest.at(Ipv4Addr::new(127, 9, 9, 9)).name_socket().await;
    stranger.send(&question("a.test.", RecordType::A).to_vec().unwrap()).await.unwrap();
    // Questions are taken in turn: once this one is answered, the other was, or never will be.
    world.guest.ask("a.test.", RecordType::A).await;
    let nothing = stranger.try_recv(&mut [0; 512]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
}
