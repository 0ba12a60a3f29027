//! Saves of gVisor.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_engines::gvisor::fuzzing::gvisor_save(bytes));
