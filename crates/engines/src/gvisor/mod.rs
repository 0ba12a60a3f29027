//! gvisor.
