//! Entry points of fuzz targets: what holds whatever a guest sends.

#[path = "../../../fuzz/input.rs"]
mod input;

use serde::Serialize;
use serde::de::DeserializeOwned;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_guest_frame() {
        input::replay("guest_frame", guest_frame);
    }

    #[test]
    fn no_seed_breaks_guest_line() {
        input::replay("guest_line", guest_line);
    }
}
