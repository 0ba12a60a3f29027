//! A server that means harm to whoever copies files from it or reads its words with `torpor`.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;

use tempfile::TempDir;
use torpor_e2e::torpor_binary;

use super::tar::{CHAR_DEVICE, DIRECTORY, HARD_LINK, LONG_NAME, Tar};
use super::{Attempt, all_hold};

const NASTY: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\r\u{9b}31m";

pub(super) const ATTEMPTS: &[Attempt<Stage>] = &[
    ("copy out an archive with paths that lead out", paths_that_lead_out),
    ("copy out a link and a file behind it", a_file_behind_a_link),
    ("copy out a hard link to a file that is here", a_hard_link),
    ("copy out devices and set-user-ID programs", devices_and_set_uid),
    ("copy out names of 4096 bytes and without end", long_names),
    ("show escape codes in names and errors of a server", escape_codes),
    ("send a client an answer without end", an_answer_without_end),
];

/// A directory into which is copied, and one beside it.
pub(super) struct Stage {
    dir: TempDir,
}

impl Stage {
    fn set() -> Self {
        let dir = tempfile::Builder::new().prefix("torpor-test-").tempdir().unwrap();
        let stage = Self { dir };
        fs::create_dir(stage.outside()).unwrap();
        fs::write(stage.outside().join("flag"), "as it was").unwrap();
        stage
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    /// Copies what a server gives; `torpor` ends either way.
    fn copy(&self, tar: Vec<u8>) -> Output {
        let into = self.dir.path().join("into");
        let _ = fs::remove_dir_all(&into);
        fs::create_dir(&into).unwrap();
        let address = serve(tar);
        let output = torpor(&address, &["cp", "web:/srv/.", into.to_str().unwrap()]);
        assert!(output.status.code().is_some(), "{output:?}");
        self.untouched();
        output
    }

    #[track_caller]
    fn untouched(&self) {
        let names: Vec<_> = fs::read_dir(self.outside()).unwrap().flatten().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(fs::read_to_string(self.outside().join("flag")).unwrap(), "as it was");
        let beside: Vec<_> = fs::read_dir(self.dir.path()).unwrap().flatten().collect();
        assert!(beside.len() <= 2, "{beside:?}");
    }

    /// Whatever was copied, with everything below it.
    fn copied(&self) -> Vec<fs::Metadata> {
        let found = Command::new("find").arg(self.dir.path().join("into")).output().unwrap();
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        found.lines().filter_map(|path| fs::symlink_metadata(path).ok()).collect()
    }
}

fn torpor(address: &str, args: &[&str]) -> Output {
    let server = format!("http://{address}");
    Command::new("timeout")
        .args(["30"])
        .arg(torpor_binary())
        .args(args)
        .env("TORPOR_SERVER", server)
        .output()
        .unwrap()
}

/// Gives each connection what `answer` makes of its request.
fn serve_with(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || {
                let mut bytes = vec![0; 65536];
                let length = stream.read(&mut bytes).unwrap_or(0);
                let _ = stream.write_all(&answer(&String::from_utf8_lossy(&bytes[..length])));
            });
        }
    });
    address
}

fn plain(status: &str, kind: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Says that everything is a directory, and gives this for its content.
fn serve(tar: Vec<u8>) -> String {
    serve_with(move |request| {
        if request.contains("/archive") {
            return plain("200 OK", "application/x-tar", &tar);
        }
        let stat = r#"{"path":"/srv","name":"srv","kind":"directory","size":0,"mode":493,"uid":0,"gid":0,"modified_at":"1970-01-01T00:00:00.000Z"}"#;
        plain("200 OK", "application/json", stat.as_bytes())
    })
}

fn root() -> Tar {
    Tar::default().entry(DIRECTORY, "srv/", "", b"").file("srv/honest", b"x")
}

fn paths_that_lead_out(stage: &Stage) {
    let outside = stage.outside();
    let outside = outside.to_str().unwrap();
    let honest = stage.copy(root().end());
    assert!(honest.status.success(), "an honest one is copied: {honest:?}");
    for name in [
        "../outside/new".to_owned(),
        "srv/../../outside/new".to_owned(),
        "srv/../../new".to_owned(),
        format!("{outside}/new"),
        format!("srv/{}{outside}/new", "../".repeat(20)),
        "srv/..".to_owned(),
    ] {
        stage.copy(root().file(&name, b"x").end());
    }
}

fn a_file_behind_a_link(stage: &Stage) {
    let outside = stage.outside();
    for to in [outside.to_str().unwrap(), "../outside", "../../outside"] {
        stage.copy(root().link("srv/out", to).file("srv/out/new", b"x").end());
        stage.copy(root().link("srv/out", &format!("{to}/flag")).file("srv/out", b"x").end());
        let again = root().entry(DIRECTORY, "srv/dir/", "", b"").link("srv/dir", to);
        stage.copy(again.file("srv/dir/new", b"x").end());
        stage.copy(root().link("srv", to).file("srv/new", b"x").end());
    }
}

fn a_hard_link(stage: &Stage) {
    let flag = stage.outside().join("flag");
    for to in [flag.to_str().unwrap(), "../outside/flag", "../../outside/flag"] {
        let tar = root().entry(HARD_LINK, "srv/mine", to, b"");
        stage.copy(tar.file("srv/mine", b"written through").end());
    }
}

fn devices_and_set_uid(stage: &Stage) {
    let program = root().file("srv/program", b"#!/bin/sh\n");
    stage.copy(program.entry(CHAR_DEVICE, "srv/cuse", "", b"").end());
    for about in stage.copied() {
        let kind = about.file_type();
        assert!(kind.is_file() || kind.is_dir(), "{about:?}");
        assert_eq!(about.permissions().mode() & 0o6000, 0, "{about:?}");
    }
}

fn long_names(stage: &Stage) {
    for length in [255, 256, 4095, 4096, 1 << 20, 40 << 20] {
        let name = format!("srv/{}\0", "n".repeat(length));
        let tar = root().entry(LONG_NAME, "././@LongLink", "", name.as_bytes());
        stage.copy(tar.file("srv/short", b"x").end());
    }
    let deep = format!("srv/{}x\0", "d/".repeat(30_000));
    let tar = root().entry(LONG_NAME, "././@LongLink", "", deep.as_bytes());
    stage.copy(tar.file("srv/short", b"x").end());
}

/// Nothing of it reaches the terminal as it is.
#[track_caller]
fn harmless(output: &Output) {
    let said = [output.stdout.as_slice(), &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let bad = |c: char| c.is_control() && c != '\n' && c != '\t';
    assert!(!said.contains(bad), "{said:?}");
    assert!(said.len() < 64 << 10, "{} bytes", said.len());
}

fn escape_codes(stage: &Stage) {
    let named = root().entry(CHAR_DEVICE, &format!("srv/{NASTY}"), "", b"");
    harmless(&stage.copy(named.file(&format!("srv/{NASTY}/x"), b"x").end()));
    let error = serde_json::json!({"code": NASTY, "message": NASTY.repeat(2000), "hint": NASTY, "request_id": NASTY});
    let error = error.to_string();
    let json = serve_with(move |_| plain("400 Bad Request", "application/json", error.as_bytes()));
    let text = serve_with(|_| plain("502 Bad Gateway", "text/plain", NASTY.as_bytes()));
    for address in [&json, &text] {
        for args in [
            &["ls"] as &[&str],
            &["run", "web", "--", "true"],
            &["rm", "web"],
            &["cp", "web:/x", "/dev/null"],
        ] {
            harmless(&torpor(address, args));
        }
    }
}

fn an_answer_without_end(_: &Stage) {
    let body = vec![b'['; 200 << 20];
    let endless = serve_with(move |_| plain("200 OK", "application/json", &body));
    let output = torpor(&endless, &["ls"]);
    assert!(output.status.code().is_some_and(|code| code != 0 && code != 124), "{output:?}");
    harmless(&output);
}

#[test]
fn a_hostile_server_does_no_harm_to_its_client() {
    all_hold(&Stage::set(), ATTEMPTS);
}
