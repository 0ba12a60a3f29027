//! The binary under test, and how it ended.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How a `torpor` ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    /// The output of a success; whatever else happened is shown.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.stdout
    }

    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// Exit code and standard error of a failure that printed nothing else.
    #[track_caller]
    pub(crate) fn failed(self) -> (i32, String) {
        assert_eq!(self.stdout, "", "{self:?}");
        (self.code, self.stderr)
    }
}

/// A `torpor` that knows no daemon.
pub(crate) fn bare<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    command.args(args).kill_on_drop(true);
    for variable in ["TORPOR_SERVER", "TORPOR_API_KEY", "TORPOR_CONFIG", "TERM"] {
        command.env_remove(variable);
    }
    command
}

pub(crate) async fn finish(mut command: Command, stdin: &[u8]) -> Done {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let bytes = stdin.to_vec();
    let feed = tokio::spawn(async move {
        // Who does not read it all has its reasons.
        let _ = input.write_all(&bytes).await;
    });
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await;
    let output = output.expect("torpor ends in time").unwrap();
    feed.abort();
    Done {
        code: output.status.code().expect("no signal ended it"),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Waits for a value with a deadline.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(tokio::time::Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}
