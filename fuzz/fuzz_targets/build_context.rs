//! Build contexts.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_service::builds::fuzzing::build_context(bytes));
