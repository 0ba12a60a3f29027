//! `machine.json` of saved microVMs.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_qemu::unit::fuzzing::qemu_about(bytes));
