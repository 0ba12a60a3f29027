//! Images, build contexts and snapshot files that were made to reach the host's files or to use up its disk.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use torpor_e2e::{Answer, World};

use super::tar::{CHAR_DEVICE, DIRECTORY, HARD_LINK, LONG_NAME, PAX, Tar};
use super::{Attempt, all_hold, daemon_is_well};

/// What only a file of the host has in it.
const FLAG: &str = "flag-of-the-host-0e1b5c";

pub(super) const ATTEMPTS: &[Attempt<Stage>] = &[
    ("an image with paths that lead out", paths_that_lead_out),
    ("an image with a link that leads out and a file behind it", a_file_behind_a_link),
    ("an image with a hard link to a file of the host", a_hard_link_out),
    ("an image that replaces a directory of its own by a link", a_directory_becomes_a_link),
    ("an image with device nodes and names of 4096 bytes", devices_and_long_names),
    ("an image that is a gzip bomb", a_gzip_bomb),
    ("an image whose headers lie about sizes", sizes_that_lie),
    ("an image with a name of 64 megabytes", a_name_without_end),
    ("an image whose blobs are not what their digests say", wrong_digests),
    ("an image whose manifest names files outside", a_manifest_that_leads_out),
    ("a snapshot file with paths that lead out", snapshot_files),
    ("a build that copies files of the host", copies_from_outside),
    ("a build whose context has links to the host", a_context_with_links),
    ("a build whose Dockerfile is elsewhere", a_dockerfile_elsewhere),
    ("a build that adds from the metadata service", adds_from_private_places),
];

pub(super) struct Stage {
    world: World,
    /// A directory of the host into which nothing may come, with the flag in it.
    outside: PathBuf,
    /// Images that were there before.
    images: BTreeSet<PathBuf>,
}

impl Stage {
    fn set() -> Self {
        let world = World::start();
        let outside = world.path("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("flag"), FLAG).unwrap();
        let images = images(&world);
        Self { world, outside, images }
    }

    fn outside(&self) -> &str {
        self.outside.to_str().unwrap()
    }

    fn send(&self, path: &str, body: &[u8]) -> Answer {
        self.world.request("POST", path, "content-type: application/x-tar\r\n", body)
    }

    fn import(&self, body: &[u8]) -> Answer {
        self.send("/v1/images/import?name=hostile", body)
    }

    /// The host is as it was, whatever became of the image.
    #[track_caller]
    fn untouched(&self) {
        let names: Vec<_> = fs::read_dir(&self.outside).unwrap().flatten().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(fs::read_to_string(self.outside.join("flag")).unwrap(), FLAG);
        let new: Vec<_> = images(&self.world).difference(&self.images).cloned().collect();
        let holders = Command::new("grep").args(["-rlF", FLAG, "/dev/null"]).args(new).output();
        let holders = String::from_utf8_lossy(&holders.unwrap().stdout).into_owned();
        assert_eq!(holders, "", "the flag is in an image");
        let staged = fs::read_dir(self.world.data_dir().join("staging")).unwrap().count();
        assert_eq!(staged, 0, "something is left in staging");
        self.world.delete("/v1/images/hostile");
        daemon_is_well(&self.world);
    }

    /// Refused as the client's mistake.
    #[track_caller]
    fn refused(&self, answer: &Answer) {
        let failed = answer.text().contains("\"error\"") || answer.text().contains("\"code\"");
        assert!((400..500).contains(&answer.status) || failed, "{answer:?}");
        assert!(!answer.text().contains("went wrong in the daemon"), "{answer:?}");
    }
}

fn images(world: &World) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(world.data_dir().join("images")).unwrap();
    entries.flatten().map(|entry| entry.path()).collect()
}

fn root() -> Tar {
    Tar::default().entry(DIRECTORY, "bin/", "", b"").file("bin/sh", b"#!")
}

fn paths_that_lead_out(stage: &Stage) {
    let outside = stage.outside();
    let up = "../".repeat(20);
    for name in [
        format!("{up}{}/new", &outside[1..]),
        format!("{outside}/new"),
        format!("bin/{up}{}/new", &outside[1..]),
        format!("./bin/.././{up}{}/new", &outside[1..]),
        "..".to_owned(),
        "bin/..".to_owned(),
    ] {
        stage.import(&root().file(&name, b"x").end());
        stage.untouched();
    }
}

fn a_file_behind_a_link(stage: &Stage) {
    let outside = stage.outside();
    for (link, file) in [("out", "out/new"), ("bin/out", "bin/out/new"), ("out", "out/../out/new")]
    {
        stage.import(&root().link(link, outside).file(file, b"x").end());
        stage.import(&root().link(link, outside).file(link, b"x").end());
        stage.untouched();
    }
    stage.import(&root().link("flag", &format!("{outside}/flag")).file("flag", b"x").end());
    stage.untouched();
}

fn a_hard_link_out(stage: &Stage) {
    let flag = format!("{}/flag", stage.outside());
    let up = format!("{}{flag}", "../".repeat(20));
    for target in [flag.as_str(), &up, &flag[1..]] {
        stage.import(&root().entry(HARD_LINK, "stolen", target, b"").end());
        stage.import(&root().entry(HARD_LINK, "stolen", target, b"").file("stolen", b"x").end());
        let through = root().link("dir", stage.outside());
        stage.import(&through.entry(HARD_LINK, "stolen", "dir/flag", b"").end());
        stage.untouched();
    }
}

fn a_directory_becomes_a_link(stage: &Stage) {
    let made = root().entry(DIRECTORY, "dir/", "", b"").file("dir/one", b"1");
    stage.import(&made.link("dir", stage.outside()).file("dir/two", b"2").end());
    stage.untouched();
    let white = root().link("dir", stage.outside()).file("dir/.wh.flag", b"");
    stage.import(&white.file("dir/.wh..wh..opq", b"").end());
    stage.untouched();
}

fn devices_and_long_names(stage: &Stage) {
    let long = format!("{}\0", "n".repeat(4095));
    let deep = format!("{}x\0", "d/".repeat(2040));
    let mut tar = root().entry(CHAR_DEVICE, "dev/cuse", "", b"");
    for name in [&long, &deep] {
        tar = tar.entry(LONG_NAME, "././@LongLink", "", name.as_bytes()).file("short", b"x");
    }
    stage.import(&tar.end());
    stage.untouched();
}

/// Runs a program with something on its stdin.
fn piped(program: &str, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new(program);
    let mut child =
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || pipe.write_all(&input));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    output.stdout
}

fn a_gzip_bomb(stage: &Stage) {
    let head = Tar::default().claiming(b'0', "big", "", "77777777777", b"").torn();
    let mut bomb = piped("gzip", &["-c"], &head);
    let zeros = piped("gzip", &["-9c"], &vec![0; 32 << 20]);
    // 8 GB, as members of one stream.
    (0..256).for_each(|_| bomb.extend_from_slice(&zeros));
    let before = used(&stage.world.data_dir());
    stage.refused(&stage.import(&bomb));
    stage.untouched();
    let grown = used(&stage.world.data_dir()).saturating_sub(before);
    assert!(grown < 100 << 20, "{grown} bytes are left of it");
    stage.refused(&stage.send("/v1/images/build?name=hostile", &bomb));
    stage.refused(&stage.send("/v1/snapshots/import", &bomb));
    stage.untouched();
}

/// Bytes on disk below a directory.
pub(super) fn used(dir: &Path) -> u64 {
    let du = Command::new("du").args(["-s", "--block-size=1"]).arg(dir).output().unwrap();
    let text = String::from_utf8_lossy(&du.stdout).into_owned();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn sizes_that_lie(stage: &Stage) {
    for size in
        ["77777777777", "-1", "\u{7f}\u{7f}\u{7f}", "zzzzzzzzzzz", "           ", "00000000001"]
    {
        let answer = stage.import(&root().claiming(b'0', "file", "", size, &[b'x'; 2048]).end());
        assert_ne!(answer.status, 500, "{size:?}: {answer:?}");
        stage.untouched();
    }
    for record in ["30 path=x\n", "999999999 size=1\n", "17 size=9999999999\n", "-5 path=\n", "x"] {
        let tar = root().entry(PAX, "pax", "", record.as_bytes()).file("file", b"x");
        let answer = stage.import(&tar.end());
        assert_ne!(answer.status, 500, "{record:?}: {answer:?}");
        stage.untouched();
    }
}

fn a_name_without_end(stage: &Stage) {
    let before = super::memory_of_daemon(&stage.world);
    for kind in [LONG_NAME, PAX] {
        let tar = root().entry(kind, "name", "", &vec![b'n'; 64 << 20]).file("file", b"x");
        stage.refused(&stage.import(&tar.end()));
        stage.untouched();
    }
    let grown = super::memory_of_daemon(&stage.world).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes of the daemon");
}

fn wrong_digests(stage: &Stage) {
    let digest = "0".repeat(64);
    let about = |kind: &str| {
        format!(
            r#"{{"mediaType":"application/vnd.oci.image.{kind}","digest":"sha256:{digest}","size":2}}"#
        )
    };
    let index = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, about("manifest.v1+json"));
    let manifest = format!(
        r#"{{"schemaVersion":2,"config":{},"layers":[{}]}}"#,
        about("config.v1+json"),
        about("layer.v1.tar")
    );
    let layout = Tar::default()
        .file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)
        .file("index.json", index.as_bytes())
        .file(&format!("blobs/sha256/{digest}"), manifest.as_bytes());
    stage.refused(&stage.import(&layout.end()));
    stage.untouched();
}

fn a_manifest_that_leads_out(stage: &Stage) {
    let flag = format!("{}/flag", stage.outside());
    for path in [flag.clone(), format!("{}{flag}", "../".repeat(20)), "blobs/sha256/../../x".into()]
    {
        let manifest = format!(r#"[{{"Config":{path:?},"RepoTags":["x:y"],"Layers":[{path:?}]}}]"#);
        let saved =
            Tar::default().link("layer.tar", &flag).file("manifest.json", manifest.as_bytes());
        stage.refused(&stage.import(&saved.end()));
        let digest = format!("sha256:{path}");
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":{digest:?},"size":23}}]}}"#
        );
        let layout = Tar::default().file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);
        stage.refused(&stage.import(&layout.file("index.json", index.as_bytes()).end()));
        stage.untouched();
    }
}

fn snapshot_files(stage: &Stage) {
    let (outside, up) = (stage.outside(), "../".repeat(20));
    for name in [format!("{outside}/new"), format!("{up}{outside}/new"), "manifest.json".into()] {
        for content in [&b"x"[..], b"{}", br#"{"format":1,"files":{"../../x":"y"}}"#] {
            let plain = Tar::default().file(&name, content).file("pages.img", b"x");
            stage.refused(&stage.send("/v1/snapshots/import?name=hostile", &plain.end()));
            let linked = Tar::default().link("save", outside).file("save/new", content);
            stage.refused(&stage.send("/v1/snapshots/import", &linked.file(&name, content).end()));
            stage.untouched();
        }
    }
    assert_eq!(stage.world.get("/v1/snapshots").json()["snapshots"], serde_json::json!([]));
}

/// Builds, and gives all that was said.
fn build(stage: &Stage, context: Tar, query: &str) -> String {
    let answer = stage.send(&format!("/v1/images/build?name=hostile{query}"), &context.end());
    stage.refused(&answer);
    assert!(!answer.text().contains(FLAG), "{answer:?}");
    stage.untouched();
    answer.text()
}

fn copies_from_outside(stage: &Stage) {
    let flag = format!("{}/flag", stage.outside());
    for from in [
        flag.clone(),
        format!("..{flag}"),
        format!("{}{flag}", "../".repeat(20)),
        "/etc/shadow".into(),
    ] {
        for verb in ["COPY", "ADD"] {
            let text = format!("FROM torpor/base\n{verb} {from} /stolen\n");
            build(stage, Tar::default().file("Dockerfile", text.as_bytes()), "");
        }
    }
}

fn a_context_with_links(stage: &Stage) {
    let flag = format!("{}/flag", stage.outside());
    let text = b"FROM torpor/base\nCOPY stolen /stolen\nRUN cat /stolen >/dev/null && cat /stolen && exit 7\n";
    let with = |tar: Tar| tar.file("Dockerfile", text);
    build(stage, with(Tar::default().link("stolen", &flag)), "");
    build(stage, with(Tar::default().entry(HARD_LINK, "stolen", &flag, b"")), "");
    build(stage, Tar::default().link("Dockerfile", &flag), "");
}

fn a_dockerfile_elsewhere(stage: &Stage) {
    let flag = format!("{}/flag", stage.outside());
    for path in [flag.clone(), format!("..%2f..%2f..%2f..%2f..{flag}"), "%00".into(), "..".into()] {
        let context = Tar::default().file("Dockerfile", b"FROM torpor/base\nRUN false\n");
        build(stage, context, &format!("&dockerfile={path}"));
    }
}

fn adds_from_private_places(stage: &Stage) {
    let api = stage.world.address();
    for from in
        ["http://169.254.169.254/latest", &format!("http://{api}/v1/info"), "file:///etc/passwd"]
    {
        let text = format!("FROM torpor/base\nADD {from} /stolen\n");
        build(stage, Tar::default().file("Dockerfile", text.as_bytes()), "");
    }
}

#[test]
fn hostile_archives_reach_nothing_and_leave_nothing() {
    let stage = Stage::set();
    all_hold(&stage, ATTEMPTS);
    stage.world.has_no_machines();
}
