//! Deltas of saved memory.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_qemu::unit::fuzzing::qemu_delta(bytes));
