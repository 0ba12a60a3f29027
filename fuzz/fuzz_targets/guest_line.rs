//! Packets on the serial port of a microVM.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_protocol::fuzzing::guest_line(bytes));
