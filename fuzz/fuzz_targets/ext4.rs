//! Disks of microVMs.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_ext4::fuzzing::ext4(bytes));
