//! Answers of name servers about domains.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_edge::dns::fuzzing::domain_dns(bytes));
