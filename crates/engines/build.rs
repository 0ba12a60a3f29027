//! Builds the programs that run inside of machines, as static ones, so that the engines can carry them
//! along as bytes: the agent, PID 1 of every machine, and the first program of a microVM.
//!
//! They have their own profile and their own target directory (`target/agent`): a nested cargo in
//! the outer one would wait for the lock that the outer cargo holds until this script is done. All
//! profiles of the outer build share it, so they are built once.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each program, what names it for the compiler, and what names one that packagers built themselves.
const PROGRAMS: [(&str, &str, &str); 2] = [
    ("torpor-agent", "TORPOR_AGENT", "TORPOR_AGENT_FILE"),
    ("torpor-init", "TORPOR_INIT", "TORPOR_INIT_FILE"),
];

/// How they are built.
const FLAGS: [&str; 3] = [
    "-C target-feature=+crt-static",
    // At a fixed place: a table of all that would have to be moved is a twentieth of the program.
    "-C relocation-model=static",
    // Nobody unwinds, a panic ends them, so nobody looks into the index of what would be unwound.
    "-C link-arg=-Wl,--no-eh-frame-hdr",
];

fn main() {
    let workspace = PathBuf::from(var("CARGO_MANIFEST_DIR")).join("../..");
    for input in ["agent", "init", "protocol"] {
        for part in ["src", "Cargo.toml"] {
            let path = workspace.join("crates").join(input).join(part);
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    let given = PROGRAMS.map(|(_, _, file)| {
        println!("cargo::rerun-if-env-changed={file}");
        env::var(file).ok()
    });
    let wanted = PROGRAMS.iter().zip(&given).filter(|(_, given)| given.is_none());
    let wanted: Vec<&str> = wanted.map(|((program, ..), _)| *program).collect();
    let built = if wanted.is_empty() { PathBuf::new() } else { build(&workspace, &wanted) };
    for ((program, name, _), given) in PROGRAMS.into_iter().zip(given) {
        let path = given.unwrap_or_else(|| built.join(program).display().to_string());
        println!("cargo::rustc-env={name}={path}");
    }
}

/// Builds these programs and gives the directory where they are.
fn build(workspace: &Path, programs: &[&str]) -> PathBuf {
    let target = var("TARGET");
    // <target>/<profile>/build/<package>/out
    let out = PathBuf::from(var("OUT_DIR"));
    let out = out.ancestors().nth(4).expect("cargo's layout has five levels").join("agent");
    let status = Command::new(var("CARGO"))
        .current_dir(workspace)
        .args(["build", "--quiet"])
        .args(programs.iter().flat_map(|program| ["--package", program, "--bin", program]))
        .args(["--profile", "agent", "--target", &target, "--target-dir"])
        .arg(&out)
        // The outer build's flags would be taken before RUSTFLAGS and lose the static linking.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        // Set by `cargo clippy`: it would check the programs instead of building them.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env("RUSTFLAGS", FLAGS.join(" "))
        .status()
        .expect("cargo, which runs this script, can be started");
    let files = PROGRAMS.map(|(.., file)| file).join(" and ");
    assert!(status.success(), "{programs:?} do not build ({files} name built ones)");
    out.join(target).join("agent")
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for build scripts"))
}
