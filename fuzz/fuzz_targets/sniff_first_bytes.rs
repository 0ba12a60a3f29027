//! First bytes of a connection: HTTP heads, TLS hellos.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_egress::fuzzing::sniff_first_bytes(bytes));
