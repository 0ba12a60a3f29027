//! QEMU as a part of an engine, and nothing of the engine.
//!
//! ```text
//!   build      which QEMU is here and whether it will do
//!   tick       how fast the processor's counter ticks, for emulated guests
//!   processor  which processor guests see
//!   line       its command line: one profile for boot and restore
//!   jail       starts it without rights, in its own namespaces
//!   monitor    its control socket (QMP)
//!   memory     the guest's pages: which were written, copying them out and in
//!   unit       memory, device state and disk of one moment, bound as one
//! ```

pub mod build;
#[cfg(any(test, fuzzing))]
#[path = "../../../fuzz/input.rs"]
mod input;
pub mod jail;
pub mod line;
pub mod memory;
pub mod monitor;
pub mod processor;
mod tick;
pub mod unit;
