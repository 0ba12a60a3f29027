//! Questions of guests, answers of name servers.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_egress::fuzzing::egress_dns(bytes));
