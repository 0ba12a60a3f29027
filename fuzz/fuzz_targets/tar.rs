//! Tar archives, entry by entry.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_store::fuzzing::tar(bytes));
