//! Image archives: `docker save`, OCI layouts, plain tars; also compressed.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_store::fuzzing::image(bytes));
