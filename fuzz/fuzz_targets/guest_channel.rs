//! An agent that answers anything.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_lifecycle::fuzzing::guest_channel(bytes));
