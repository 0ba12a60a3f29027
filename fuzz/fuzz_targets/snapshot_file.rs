//! Snapshot files.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_store::fuzzing::snapshot_file(bytes));
