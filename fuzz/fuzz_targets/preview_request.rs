//! Requests for previews.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_proxy::fuzzing::preview_request(bytes));
