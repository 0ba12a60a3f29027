//! What registries answer, and what people call their images.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_registry::fuzzing::registry(bytes));
