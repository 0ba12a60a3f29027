//! Packets of an agent.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_protocol::fuzzing::guest_frame(bytes));
