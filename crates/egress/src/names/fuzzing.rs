//! Entry point of a fuzz target: what holds whatever a guest asks and a name server answers.

use crate::fuzzing::input;
use hickory_proto::op::Message;
use hickory_proto::rr::{Name, RecordType};

use super::answer::{checked, too_many, unreadable};
use super::resolver::{address, answers, question};

/// Bytes of the largest answer by UDP.
const DATAGRAM_MAX: usize = 1232;

/// What a guest is answered can be read, fits a datagram and has the id of its question.
pub fn egress_dns(bytes: &[u8]) {
    for answer in [too_many(bytes), unreadable(bytes)].into_iter().flatten() {
        assert!(answer.len() <= DATAGRAM_MAX, "{} bytes", answer.len());
        assert_eq!(answer[..2], bytes[..2], "it has the id of the question");
        Message::from_vec(&answer).expect("our own answer can be read");
    }
    let Ok(message) = Message::from_vec(bytes) else { return };
    let _ = checked(&message);
    let _ = message.answers.iter().filter_map(address).count();
    let asked = Name::from_ascii("example.com.").expect("it is a name");
    let mut asked = question(&asked, RecordType::A).expect("it can be asked");
    asked.metadata.id = message.metadata.id;
    if let Some(answer) = answers(&asked, bytes) {
        assert_eq!(answer.queries, asked.queries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_egress_dns() {
        input::replay("egress_dns", egress_dns);
    }
}
