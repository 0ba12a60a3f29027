//! kernel fetch, ls, rm: without a daemon, in a data directory of the test's own.

use std::path::Path;

use tokio::process::Command;

use crate::torpor::{Done, bare, finish};

fn kernel(args: &[&str], data: &Path) -> Command {
    let data = data.to_str().unwrap();
    bare(["kernel"].iter().chain(args).copied().chain(["--data-dir", data]))
}

async fn run(args: &[&str], data: &Path) -> Done {
    finish(kernel(args, data), b"").await
}

#[tokio::test]
async fn a_directory_without_kernels_has_an_empty_list() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    assert_eq!(run(&["ls", "--json"], &data).await.json()["kernels"], serde_json::json!([]));
    let table = run(&["ls"], &data).await.ok();
    let header: Vec<&str> = table.split_whitespace().collect();
    assert_eq!(header, ["RELEASE", "ID", "SIZE", "STATE", "SOURCE"]);
    // Looking changes nothing.
    assert!(!data.exists());
}

#[tokio::test]
async fn a_kernel_that_is_not_there_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (code, words) = run(&["rm", "6.1.0-x"], dir.path()).await.failed();
    assert_eq!(code, 1);
    assert_eq!(
        words,
        "error: there is no kernel 6.1.0-x here\nhint: list them with: torpor kernel ls\n"
    );
}

#[tokio::test]
async fn what_is_no_package_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("linux.deb");
    std::fs::write(&file, "hello").unwrap();
    let args = ["fetch", "--package", file.to_str().unwrap()];
    let (code, words) = run(&args, &dir.path().join("data")).await.failed();
    assert_eq!(code, 1);
    assert_eq!(words, "error: linux.deb can't be used: it is no ar archive\n");
}

#[tokio::test]
async fn a_computer_without_apt_is_told_what_else_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = kernel(&["fetch"], &dir.path().join("data"));
    command.env("PATH", dir.path());
    let (code, words) = finish(command, b"").await.failed();
    assert_eq!(code, 1);
    assert!(words.contains("it has no apt, so it is no Debian"), "{words}");
    assert!(words.contains("--package FILE.deb"), "{words}");
    assert!(words.contains("--vmlinux FILE --modules DIR"), "{words}");
}

#[tokio::test]
async fn a_kernel_of_ones_own_needs_its_modules() {
    let dir = tempfile::tempdir().unwrap();
    let done = run(&["fetch", "--vmlinux", "x"], dir.path()).await;
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("--modules"), "{done:?}");
}
