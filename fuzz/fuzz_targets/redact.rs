//! Answers that repeat secrets.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_egress::fuzzing::redact(bytes));
