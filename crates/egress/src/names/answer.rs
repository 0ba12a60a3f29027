//! What a guest is answered.

use std::sync::Arc;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, Record, RecordType};
use torpor_protocol::egress::{EgressEvent, EgressKind, Verdict};

use super::resolver::{Answer, address};
use crate::connection::shortened;
use crate::policy::{Policy, host_of, word};
use crate::registry::Guest;
use crate::shared::Shared;

/// Bytes of an answer by UDP: fits every path.
const PAYLOAD: u16 = 1232;
/// Bytes of the head of a message: with less it has not even an id.
const HEAD: usize = 12;

/// By what the question came, and so how long the answer may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Udp,
    Tcp,
}

/// The answer to what a guest sent; none: it deserves none.
pub(super) async fn answer(
    shared: &Shared,
    guest: &Arc<Guest>,
    question: &[u8],
    by: By,
) -> Option<Vec<u8>> {
    let Ok(question) = Message::from_vec(question) else { return unreadable(question) };
    if question.metadata.message_type != MessageType::Query {
        return None;
    }
    let mut answer = reply(&question);
    match checked(&question) {
        Ok((name, kind)) => fill(shared, guest, &mut answer, name, kind).await,
        Err(code) => answer.metadata.response_code = code,
    }
    encoded(&question, &answer, by)
}

/// The same, if the guest asks too much at once.
pub(super) fn too_many(question: &[u8]) -> Option<Vec<u8>> {
    let question = Message::from_vec(question).ok()?;
    if question.metadata.message_type != MessageType::Query {
        return None;
    }
    let mut answer = reply(&question);
    answer.metadata.response_code = ResponseCode::ServFail;
    encoded(&question, &answer, By::Udp)
}

/// The one thing that is asked for, or what is wrong with it.
pub(super) fn checked(question: &Message) -> Result<(&Name, RecordType), ResponseCode> {
    if question.metadata.op_code != OpCode::Query {
        return Err(ResponseCode::NotImp);
    }
    let [query] = question.queries.as_slice() else { return Err(ResponseCode::FormErr) };
    if query.query_class() != DNSClass::IN {
        return Err(ResponseCode::Refused);
    }
    // These are no kinds of records, and ask for more than a name.
    let meta = [RecordType::AXFR, RecordType::IXFR, RecordType::OPT, RecordType::ZERO];
    match meta.contains(&query.query_type()) {
        true => Err(ResponseCode::Refused),
        false => Ok((query.name(), query.query_type())),
    }
}

async fn fill(
    shared: &Shared,
    guest: &Arc<Guest>,
    answer: &mut Message,
    name: &Name,
    kind: RecordType,
) {
    let policy = guest.policy();
    let text = name.to_ascii().to_ascii_lowercase();
    let text = text.strip_suffix('.').unwrap_or(&text).to_owned();
    let decision = policy.question(&text);
    let audit =
        |verdict, rule: String, address| audit(shared, guest, &text, verdict, rule, address);
    if !decision.allowed {
        // Not REFUSED: programs would take that for a server that is out of order, and ask again.
        answer.metadata.response_code = ResponseCode::NXDomain;
        return audit(Verdict::Denied, decision.rule, None);
    }
    if is_never_asked(kind) {
        return;
    }
    let Ok(found) = shared.dialer.resolver.ask(name, kind).await else {
        answer.metadata.response_code = ResponseCode::ServFail;
        return audit(Verdict::Failed, decision.rule, None);
    };
    answer.metadata.response_code = found.code;
    let kept = found.records.iter().filter(|record| keeps(&policy, record, kind));
    answer.answers = kept.cloned().collect();
    remember(guest, &policy, &text, &found);
    match found.addresses().find(|(address, _)| !policy.may_tell(*address)) {
        Some((address, _)) => audit(Verdict::Denied, word::PRIVATE.to_owned(), Some(address)),
        None => audit(Verdict::Allowed, decision.rule, None),
    }
}

/// Kinds that are answered with nothing, without asking: there is no IPv6, and hints of services lead to
/// QUIC and to encrypted names.
fn is_never_asked(kind: RecordType) -> bool {
    [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB, RecordType::ANY].contains(&kind)
}

/// Whether a record is for the guest: of the kind it asked for or on the way to it, and no address that
/// it must not know.
fn keeps(policy: &Policy, record: &Record, asked: RecordType) -> bool {
    let kind = record.record_type();
    let wanted = kind == asked || kind == RecordType::CNAME;
    wanted && address(record).is_none_or(|address| policy.may_tell(address))
}

/// The addresses belong to the name that was asked for from now on.
fn remember(guest: &Guest, policy: &Policy, name: &str, found: &Answer) {
    let Some(host) = host_of(name) else { return };
    for (address, ttl) in found.addresses().filter(|(address, _)| policy.may_tell(*address)) {
        guest.answered(&host, address, ttl);
    }
}

/// An answer without any content yet.
fn reply(question: &Message) -> Message {
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.metadata.recursion_desired = question.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.queries = question.queries.iter().take(1).cloned().collect();
    if question.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(PAYLOAD);
        answer.set_edns(edns);
    }
    answer
}

/// The bytes; without any content if they are too many, so that the guest asks again by TCP.
fn encoded(question: &Message, answer: &Message, by: By) -> Option<Vec<u8>> {
    let bytes = answer.to_vec().ok()?;
    let limit = match by {
        By::Udp => question.max_payload().min(PAYLOAD),
        By::Tcp => u16::MAX,
    };
    if bytes.len() <= usize::from(limit) {
        return Some(bytes);
    }
    let mut short = reply(question);
    short.metadata.response_code = answer.metadata.response_code;
    short.metadata.truncation = true;
    short.to_vec().ok()
}

/// To what can't be read, if it has at least a head and asks for something.
pub(super) fn unreadable(question: &[u8]) -> Option<Vec<u8>> {
    let (id, flags) = (question.get(..2)?, *question.get(2)?);
    let is_answer = flags & 0x80 != 0;
    if question.len() < HEAD || is_answer {
        return None;
    }
    let id = u16::from_be_bytes([id[0], id[1]]);
    Message::error_msg(id, OpCode::Query, ResponseCode::FormErr).to_vec().ok()
}

fn audit(
    shared: &Shared,
    guest: &Guest,
    name: &str,
    verdict: Verdict,
    rule: String,
    address: Option<std::net::Ipv4Addr>,
) {
    shared.audit.record(EgressEvent {
        host: Some(shortened(name.to_owned())),
        address,
        ..shared.event(guest, EgressKind::Name, verdict, rule)
    });
}
