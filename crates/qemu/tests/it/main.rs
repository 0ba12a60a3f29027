//! The parts together, on a real QEMU: jailed, commanded, saved and revived.
//!
//! Needs root and QEMU 10 or newer; emulates, so it needs no KVM.

#![expect(clippy::unwrap_used, reason = "a test that can't go on stops")]

mod jail;
mod machine;
mod revive;
