//! Entry points of fuzz targets: what holds whatever a guest sends.

#[path = "../../../fuzz/input.rs"]
mod input;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::guest::files::{Joiner, PREFIX, decode_answer, decode_call, encode_answer, encode_call};
use crate::guest::line::{Decoder, encode};
use crate::guest::{self, Frame, HEADER, Hello, MAX_PAYLOAD, Reply, Request};

/// A packet is refused, or put together again it is the same; so is what it says.
pub fn guest_frame(packet: &[u8]) {
    let Ok(frame) = Frame::parse(packet) else { return };
    assert_eq!(guest::packet(frame.stream, frame.kind, frame.payload), packet);
    let _ = frame.credit();
    survives::<Hello>(&frame);
    survives::<Reply>(&frame);
    survives::<Request>(&frame);
}

fn survives<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(frame: &Frame<'_>) {
    let Ok(said) = frame.json::<T>() else { return };
    let again = serde_json::to_vec(&said).expect("it can be written");
    assert_eq!(serde_json::from_slice::<T>(&again).expect("it can be read again"), said);
}

/// The same packets are found however the line is cut, and none is too large.
pub fn guest_line(bytes: &[u8]) {
    let Some((line, pieces)) = input::pieces(bytes) else { return };
    let packets = decoded(&[line]);
    assert_eq!(decoded(&pieces), packets);
    for packet in packets {
        assert!(packet.len() <= HEADER + MAX_PAYLOAD, "{} bytes", packet.len());
        let mut again = Vec::new();
        encode(&packet, &mut again);
        assert_eq!(decoded(&[&again]), [packet]);
    }
}

fn decoded(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut decoder = Decoder::new();
    let mut packets = Vec::new();
    for mut piece in pieces.iter().copied() {
        while let Some(packet) = decoder.next(&mut piece) {
            packets.push(packet.to_vec());
        }
    }
    packets
}

/// The same calls and answers are found however they are cut, and put together again they are the same.
pub fn guest_files(bytes: &[u8]) {
    let Some((content, pieces)) = input::pieces(bytes) else { return };
    let (all, messages) = joined(&[content]);
    assert_eq!(joined(&pieces), (all, messages.clone()));
    for message in &messages {
        let mut again = Vec::new();
        if let Ok((sequence, marked, call)) = decode_call(message) {
            encode_call(sequence, marked, &call, &mut again);
            assert_eq!(&again[PREFIX..], message);
        }
        again.clear();
        if let Ok((sequence, answer)) = decode_answer(message) {
            encode_answer(sequence, &answer, &mut again);
            assert_eq!(&again[PREFIX..], message);
        }
    }
}

/// Whether all was well, and the messages up to where it was not.
fn joined(pieces: &[&[u8]]) -> (bool, Vec<Vec<u8>>) {
    let (mut joiner, mut messages) = (Joiner::default(), Vec::new());
    for piece in pieces {
        if joiner.push(piece, |message| messages.push(message.to_vec())).is_err() {
            return (false, messages);
        }
    }
    (true, messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_guest_frame() {
        input::replay("guest_frame", guest_frame);
    }

    #[test]
    fn no_seed_breaks_guest_files() {
        input::replay("guest_files", guest_files);
    }

    #[test]
    fn no_seed_breaks_guest_line() {
        input::replay("guest_line", guest_line);
    }
}
