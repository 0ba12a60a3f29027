//! Archives from a sandbox, unpacked by `torpor cp`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_cli::fuzzing::cli_unpack(bytes));
