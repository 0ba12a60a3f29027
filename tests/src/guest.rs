//! Programs of ours in a sandbox, and its sleep.

use std::fs;
use std::path::Path;

use crate::World;

/// Both depths of sleep.
pub const TIERS: [&str; 2] = ["warm", "cold"];
/// Where the programs of `tests/guest` are, inside.
pub const GUEST: &str = "/opt/guest";

impl World {
    /// Writes a file in a sandbox.
    #[track_caller]
    pub fn put(&self, sandbox: &str, path: &str, content: &[u8]) {
        let url = format!("/v1/sandboxes/{sandbox}/files/content?path={path}");
        let answer = self.request("PUT", &url, "", content);
        assert!((200..300).contains(&answer.status), "{path}: {answer:?}");
    }

    /// Puts the programs of `tests/guest` into a sandbox.
    #[track_caller]
    pub fn put_guest_programs(&self, sandbox: &str) {
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest");
        for program in fs::read_dir(programs).expect("it is in the repository").flatten() {
            let name = program.file_name().to_string_lossy().into_owned();
            let content = fs::read(program.path()).expect("a small file");
            self.put(sandbox, &format!("{GUEST}/{name}"), &content);
        }
    }

    /// Puts a sandbox to sleep as deeply as `tier` says; all of it is on disk afterwards.
    #[track_caller]
    pub fn sleep(&self, sandbox: &str, tier: &str) {
        let args = ["sleep", sandbox, "--cold"];
        self.torpor(if tier == "cold" { &args } else { &args[..2] }).ok();
        let status = self.inspect(sandbox);
        assert_eq!(status["state"], "asleep", "{status}");
        assert_eq!(status["tier"], tier, "{status}");
        assert_eq!(status["durable"], true, "{status}");
    }

    /// How often it woke.
    pub fn wakes(&self, sandbox: &str) -> u64 {
        self.inspect(sandbox)["wakes"].as_u64().expect("a number")
    }
}
