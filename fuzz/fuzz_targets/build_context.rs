//! Build contexts.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_daemon::builds::fuzzing::build_context(bytes));
