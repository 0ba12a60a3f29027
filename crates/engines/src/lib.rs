//! Isolation technologies: gVisor and microVMs, side by side on a host, and what they take from it.
//!
//! ```text
//!   gvisor, microvm    backends: what differs between isolation technologies
//!      │
//!     host             an engine, whatever its backend; what engines of an installation share
//!      ├── machines    whose a machine is, and what is left of it
//!      ├── keeper      the process that outlives the daemon: parent of every machine
//!      ├── network     addresses, firewall, packet sockets
//!      └── limits      cgroups: bounds, freezing, readings
//!   probe              whether this host can carry all that, for `torpor doctor`
//! ```

pub mod gvisor;
mod host;
pub use host::{EngineConfig, HostConfig, open, purge};
pub mod keeper;
pub mod limits;
mod machines;
pub use machines::Users;
pub mod microvm;
pub mod network;
mod packet;
pub use torpor_qemu::jail::start as jail;
pub mod probe;
mod watch;

use torpor_disk::{self as disk, directory, mountinfo, program};

/// The agent, a static program, to be put at [`torpor_lifecycle::engine::AGENT_PATH`] of every root.
pub static AGENT: &[u8] = include_bytes!(env!("TORPOR_AGENT"));
/// The first program of a microVM, static too: `/init` of its initial file system.
pub static INIT: &[u8] = include_bytes!(env!("TORPOR_INIT"));

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind of a program header that names a dynamic loader (ELF's PT_INTERP).
    const INTERPRETER: u32 = 3;

    fn number<const N: usize>(program: &[u8], at: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&program[at..at + N]);
        u64::from_le_bytes(bytes)
    }

    fn assert_static(program: &[u8]) {
        assert_eq!(&program[..5], b"\x7fELF\x02", "a 64-bit program");
        let table = number::<8>(program, 0x20);
        let (size, count) = (number::<2>(program, 0x36), number::<2>(program, 0x38));
        assert!(count > 0, "it has program headers");
        for header in 0..count {
            let at = usize::try_from(table + header * size).unwrap();
            let kind = number::<4>(program, at);
            assert_ne!(kind, u64::from(INTERPRETER), "it needs a dynamic loader");
        }
    }

    #[test]
    fn the_agent_is_static_and_small() {
        assert_static(AGENT);
        // A tenth of it is for files that the host serves to microVMs.
        assert!(AGENT.len() < 2_400_000, "it has {} bytes", AGENT.len());
    }

    #[test]
    fn the_first_program_of_a_microvm_is_static_and_small() {
        assert_static(INIT);
        assert!(INIT.len() < 1_200_000, "it has {} bytes", INIT.len());
    }
}
