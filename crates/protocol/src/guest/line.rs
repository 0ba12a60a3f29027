//! Packets over a line of bytes: the serial port of a microVM.
//!
//! A packet is `FLAG`, its bytes with `FLAG` and `ESCAPE` escaped, then `ESCAPE` and `END`. So `FLAG`
//! never stands inside of a packet, whatever is sent, and both sides find the next packet again after a
//! machine was saved in the middle of one: half a packet is dropped, and nothing that a user sends can
//! pass for a beginning. An end that is not a `FLAG` tells a packet that is whole from one that was
//! torn and is followed by the next. Whoever connects skips everything before the first `FLAG`, and
//! begins with a new [`Decoder`].

use super::{HEADER, MAX_PAYLOAD};

/// Before a packet.
pub const FLAG: u8 = 0xC0;
/// Before a byte that is not itself.
pub const ESCAPE: u8 = 0xDB;
/// `ESCAPE` and this is `FLAG`.
pub const ESCAPED_FLAG: u8 = 0xDC;
/// `ESCAPE` and this is `ESCAPE`.
pub const ESCAPED_ESCAPE: u8 = 0xDD;
/// `ESCAPE` and this is the end of a packet.
pub const END: u8 = 0xDE;

/// Larger packets are dropped.
const MAX_PACKET: usize = HEADER + MAX_PAYLOAD;
/// Bytes of a line that are looked at in one step.
const WORD: usize = size_of::<u64>();

/// Appends `packet` as it goes over the line. The other side drops one larger than a frame can be.
pub fn encode(packet: &[u8], into: &mut Vec<u8>) {
    debug_assert!(packet.len() <= MAX_PACKET, "callers cut payloads");
    // Random bytes need one escape in 128.
    into.reserve(packet.len() + packet.len() / 64 + 3);
    into.push(FLAG);
    let mut rest = packet;
    loop {
        let (plain, after) = rest.split_at(plain(rest));
        into.extend_from_slice(plain);
        let Some((&special, after)) = after.split_first() else { break };
        into.push(ESCAPE);
        into.push(if special == FLAG { ESCAPED_FLAG } else { ESCAPED_ESCAPE });
        rest = after;
    }
    into.extend_from_slice(&[ESCAPE, END]);
}

/// Finds packets in a line of bytes, however it is cut. Keeps one packet at most.
#[derive(Debug, Default)]
pub struct Decoder {
    packet: Vec<u8>,
    state: State,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a packet, or after one that is no packet.
    #[default]
    Outside,
    Inside,
    /// The last byte was `ESCAPE`.
    Escaped,
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes off `line` until a packet is whole. None: `line` is used up, and what comes next on
    /// the line is to be given to the next call.
    pub fn next(&mut self, line: &mut &[u8]) -> Option<&[u8]> {
        while !line.is_empty() {
            let whole = match self.state {
                State::Outside => self.skip(line),
                State::Inside => self.plain(line),
                State::Escaped => self.escaped(line),
            };
            if whole {
                return Some(&self.packet);
            }
        }
        None
    }

    fn skip(&mut self, line: &mut &[u8]) -> bool {
        loop {
            let (_, after) = line.split_at(plain(line));
            let Some((&special, after)) = after.split_first() else { break };
            *line = after;
            if special == FLAG {
                self.begin();
                return false;
            }
        }
        *line = &[];
        false
    }

    fn plain(&mut self, line: &mut &[u8]) -> bool {
        let (plain, after) = line.split_at(plain(line));
        *line = after;
        self.keep(plain);
        if let Some((&special, after)) = after.split_first() {
            *line = after;
            if special == FLAG {
                self.begin();
            } else if self.state == State::Inside {
                self.state = State::Escaped;
            }
        }
        false
    }

    fn escaped(&mut self, line: &mut &[u8]) -> bool {
        let Some((&byte, after)) = line.split_first() else { return false };
        *line = after;
        self.state = State::Inside;
        match byte {
            ESCAPED_FLAG => self.keep(&[FLAG]),
            ESCAPED_ESCAPE => self.keep(&[ESCAPE]),
            END => {
                self.state = State::Outside;
                return true;
            }
            FLAG => self.begin(),
            // Nothing that an encoder says.
            _ => self.state = State::Outside,
        }
        false
    }

    fn begin(&mut self) {
        self.packet.clear();
        self.state = State::Inside;
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.packet.len() + bytes.len() > MAX_PACKET {
            self.state = State::Outside;
        } else {
            self.packet.extend_from_slice(bytes);
        }
    }
}

/// How many bytes there are before the first that is special. A word at a time: this runs in emulated
/// machines, over everything that goes in and out.
fn plain(bytes: &[u8]) -> usize {
    let (words, rest) = bytes.as_chunks::<WORD>();
    for (at, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let special = zeros(word ^ every(FLAG)) | zeros(word ^ every(ESCAPE));
        if special != 0 {
            return at * WORD + special.trailing_zeros() as usize / 8;
        }
    }
    let special = |byte: &u8| matches!(*byte, FLAG | ESCAPE);
    words.len() * WORD + rest.iter().position(special).unwrap_or(rest.len())
}

/// A word of this byte.
const fn every(byte: u8) -> u64 {
    u64::from_le_bytes([byte; WORD])
}

/// The highest bit of the first byte that is zero, and of none before it. Bytes after it may be marked
/// although they are not zero.
const fn zeros(word: u64) -> u64 {
    word.wrapping_sub(every(0x01)) & !word & every(0x80)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn line(packets: &[Vec<u8>]) -> Vec<u8> {
        let mut line = Vec::new();
        for packet in packets {
            encode(packet, &mut line);
        }
        line
    }

    /// What the decoder makes of pieces of a line.
    fn decode<'a>(
        decoder: &mut Decoder,
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        for mut piece in pieces {
            while let Some(packet) = decoder.next(&mut piece) {
                packets.push(packet.to_vec());
            }
            assert!(piece.is_empty(), "it was used up");
        }
        packets
    }

    /// Bytes of which many are special, or come near it.
    fn byte() -> impl Strategy<Value = u8> {
        let special = [FLAG, ESCAPE, ESCAPED_FLAG, ESCAPED_ESCAPE, END, FLAG + 1, FLAG - 1];
        prop_oneof![2 => any::<u8>(), 1 => proptest::sample::select(special.to_vec())]
    }

    fn packets() -> impl Strategy<Value = Vec<Vec<u8>>> {
        vec(vec(byte(), 0..70), 0..8)
    }

    #[test]
    fn a_packet_as_large_as_a_frame_can_be_arrives_and_a_larger_one_does_not() {
        for special in [b'a', FLAG, ESCAPE] {
            let largest = std::vec![special; MAX_PACKET];
            let mut bytes = line(std::slice::from_ref(&largest));
            // One byte more, before the end.
            let mut larger = bytes[..bytes.len() - 2].to_vec();
            larger.extend_from_slice(&[b'x', ESCAPE, END]);
            bytes.extend_from_slice(&larger);
            encode(b"after", &mut bytes);
            let mut decoder = Decoder::new();
            let packets = decode(&mut decoder, [&bytes[..]]);
            assert_eq!(packets.len(), 2);
            assert_eq!(packets[0], largest);
            assert_eq!(packets[1], b"after");
        }
    }

    #[test]
    fn a_packet_without_an_end_takes_no_more_memory_than_the_largest() {
        let mut decoder = Decoder::new();
        assert!(decode(&mut decoder, [&[FLAG][..]]).is_empty());
        for _ in 0..100 {
            assert!(decode(&mut decoder, [&[b'a'; 100_000][..]]).is_empty());
        }
        assert!(decoder.packet.capacity() <= 2 * MAX_PACKET);
    }

    #[test]
    fn an_escape_that_means_nothing_drops_its_packet_only() {
        let mut bytes = std::vec![FLAG, b'a', ESCAPE, b'b', b'c', ESCAPE, END];
        encode(b"after", &mut bytes);
        assert_eq!(decode(&mut Decoder::new(), [&bytes[..]]), [b"after"]);
    }

    proptest! {
        #[test]
        fn every_packet_arrives_however_the_line_is_cut(packets in packets(), piece in 1usize..40) {
            let line = line(&packets);
            prop_assert_eq!(decode(&mut Decoder::new(), line.chunks(piece)), packets);
        }

        #[test]
        fn a_torn_packet_is_dropped_and_what_follows_arrives(
            before in packets(), torn in vec(byte(), 0..70), cut in any::<prop::sample::Index>(),
            after in packets(),
        ) {
            let (before_line, mut torn_line) = (line(&before), line(&[torn]));
            torn_line.truncate(cut.index(torn_line.len()));
            let after_line = line(&after);
            let pieces = [&before_line[..], &torn_line[..], &after_line[..]];
            let arrived = decode(&mut Decoder::new(), pieces);
            prop_assert_eq!(arrived, [before, after].concat());
        }

        #[test]
        fn who_comes_late_gets_whole_packets_only(
            torn in vec(byte(), 0..70), cut in any::<prop::sample::Index>(), after in packets(),
        ) {
            let torn_line = line(&[torn]);
            let rest = &torn_line[1 + cut.index(torn_line.len() - 1)..];
            let after_line = line(&after);
            prop_assert_eq!(decode(&mut Decoder::new(), [rest, &after_line[..]]), after);
        }

        #[test]
        fn whatever_is_on_the_line_the_next_packet_arrives(noise in vec(byte(), 0..200)) {
            let mut decoder = Decoder::new();
            decode(&mut decoder, [&noise[..]]);
            prop_assert_eq!(decode(&mut decoder, [&line(&[b"after".to_vec()])[..]]), [b"after"]);
        }

        #[test]
        fn the_first_special_byte_is_found(bytes in vec(byte(), 0..40)) {
            let special = |byte: &u8| matches!(*byte, FLAG | ESCAPE);
            prop_assert_eq!(plain(&bytes), bytes.iter().position(special).unwrap_or(bytes.len()));
        }
    }
}
