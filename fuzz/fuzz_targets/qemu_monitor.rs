//! What a QEMU says on its control socket.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torpor_qemu::monitor::fuzzing::qemu_monitor(bytes));
