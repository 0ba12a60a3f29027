//! How a test that can't run on this host says so. `./test` is strict: what its scripts install and is
//! missing all the same is a failure there, so that "all passed" means that everything was tried.

/// Set by `./test`.
const STRICT: &str = "TORPOR_TEST_STRICT";

/// The test needs something that `./test` and `scripts/setup` provide: root, runsc, QEMU, a kernel, tools.
/// Fails when strict; else the caller returns.
#[track_caller]
pub fn missing(why: impl std::fmt::Display) {
    let strict = std::env::var_os(STRICT).is_some_and(|value| !value.is_empty() && value != "0");
    assert!(
        !strict,
        "this test can't run: {why}\nhint: scripts/setup --microvm, as root, or unset {STRICT}"
    );
    not_here(why);
}

/// The test needs something that a host has or has not, whatever is installed: KVM, a kernel module. The
/// caller returns.
#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
pub fn not_here(why: impl std::fmt::Display) {
    println!("skipped, because {why}");
}
