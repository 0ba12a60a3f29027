//! Calls of a guest to a file service, and answers to it.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_protocol::fuzzing::guest_files(bytes));
