//! Builds the agent that runs as PID 1 in every machine, as a static program, so that the engines
//! can carry it along as bytes.
//!
//! The agent has its own profile and its own target directory (`target/agent`): a nested cargo in
//! the outer one would wait for the lock that the outer cargo holds until this script is done. All
//! profiles of the outer build share it, so the agent is built once.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let workspace = PathBuf::from(var("CARGO_MANIFEST_DIR")).join("../..");
    let inputs = ["agent/src", "agent/Cargo.toml", "protocol/src", "protocol/Cargo.toml"];
    for input in inputs.map(|input| format!("crates/{input}")) {
        println!("cargo::rerun-if-changed={}", workspace.join(input).display());
    }
    println!("cargo::rerun-if-env-changed=TORPOR_AGENT_FILE");
    // For packagers that build the agent themselves.
    let agent = env::var("TORPOR_AGENT_FILE").unwrap_or_else(|_| build(&workspace));
    println!("cargo::rustc-env=TORPOR_AGENT={agent}");
}

/// Builds the agent and gives its path.
fn build(workspace: &Path) -> String {
    let target = var("TARGET");
    // <target>/<profile>/build/<package>/out
    let out = PathBuf::from(var("OUT_DIR"));
    let out = out.ancestors().nth(4).expect("cargo's layout has five levels").join("agent");
    let status = Command::new(var("CARGO"))
        .current_dir(workspace)
        .args(["build", "--quiet", "--package", "torpor-agent", "--bin", "torpor-agent"])
        .args(["--profile", "agent", "--target", &target, "--target-dir"])
        .arg(&out)
        // The outer build's flags would be taken before RUSTFLAGS and lose the static linking.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        // Set by `cargo clippy`: it would check the agent instead of building it.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        // At a fixed place: a table of all that would have to be moved is a twentieth of the program.
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static")
        .status()
        .expect("cargo, which runs this script, can be started");
    assert!(status.success(), "the agent does not build (TORPOR_AGENT_FILE names a built one)");
    out.join(target).join("agent").join("torpor-agent").display().to_string()
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for build scripts"))
}
