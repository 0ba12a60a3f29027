//! Root files of images.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_store::fuzzing::erofs(bytes));
