//! Compressed answers.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_egress::fuzzing::decode(bytes));
