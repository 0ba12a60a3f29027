//! Archives that are unpacked in a machine.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_agent::fuzzing::agent_unpack(bytes));
