//! Builds of Dockerfiles, on the real engine: stages, the cache of steps, mounts, secrets, cancelling,
//! and a daemon that is killed in the middle.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use torpor_e2e::{World, wait_for};

/// A context with these files.
fn context(world: &World, files: &[(&str, &str)]) -> PathBuf {
    let dir = world.path("context");
    for (path, text) in files {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    dir
}

/// Builds `app`; gives what was said of its steps, and its id.
fn build(world: &World, dir: &Path, more: &[&str]) -> (String, String) {
    let mut args = vec!["image", "build", "-t", "app", "--json", dir.to_str().unwrap()];
    args.extend(more);
    let built = world.torpor(&args);
    assert_eq!(built.code, 0, "{built:?}");
    let image: Value = serde_json::from_str(&built.stdout).unwrap();
    (built.stderr, image["id"].as_str().unwrap().to_owned())
}

/// How many sandboxes there ever were.
fn ever(world: &World) -> usize {
    let ended = world.get("/v1/archive?limit=1000").json();
    ended["sandboxes"].as_array().unwrap().len()
}

/// What the image says to a command.
fn says(world: &World, command: &str) -> String {
    world.create_with("says", &["--image", "app"]);
    let said = world.sh("says", command).ok();
    world.torpor(&["rm", "says"]).ok();
    said
}

/// Whether a text is anywhere in a directory.
fn contains(dir: &Path, text: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = contains(&path, text) {
                return Some(found);
            }
        } else if let Ok(bytes) = fs::read(&path)
            && bytes.windows(text.len()).any(|window| window == text.as_bytes())
        {
            return Some(path);
        }
    }
    None
}

const STAGES: &str = "# syntax=docker/dockerfile:1\nARG BASE=torpor/base\nFROM $BASE AS build\n\
    WORKDIR /src\nCOPY lib.sh .\nRUN <<EOF\nset -e\nmkdir -p out/deep\ncp lib.sh out/deep/\n\
    chown 1000:1000 out/deep/lib.sh\nln -s deep/lib.sh out/link\nEOF\n\
    FROM torpor/base AS unused\nRUN exit 9\n\
    FROM build AS test\nRUN sh lib.sh > /tested\n\
    FROM torpor/base\nARG TARGETARCH\nCOPY --from=build /src/out /app\nCOPY --from=2 /tested /\n\
    COPY <<-\"EOF\" <<TWO /etc/app/\n\t$literal\n\tEOF\n$TARGETARCH\nTWO\n\
    LABEL arch=$TARGETARCH\nCMD [\"sh\", \"/app/link\"]\n";

#[test]
fn stages_take_from_each_other_and_one_that_nobody_needs_is_not_built() {
    let world = World::start();
    let dir = context(&world, &[("Dockerfile", STAGES), ("lib.sh", "echo hello\n")]);
    let (said, id) = build(&world, &dir, &[]);
    assert!(!said.contains("exit 9") && said.contains("[build 2/4]"), "{said}");
    let found = says(
        &world,
        "sh /app/link; cat /tested /etc/app/EOF /etc/app/TWO; stat -c %u:%g /app/deep/lib.sh; ls /src 2>&1 | tail -1",
    );
    let arch = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    assert!(found.starts_with(&format!("hello\nhello\n$literal\n{arch}\n1000:1000\n")), "{found}");
    assert!(found.contains("No such file"), "the first stage is not part of it: {found}");

    // A stage of its own, from what is known already.
    let before = ever(&world);
    let (said, other) = build(&world, &dir, &["--target", "test"]);
    assert!(said.contains("CACHED") && other != id, "{said}");
    assert_eq!(ever(&world), before, "nothing had to be done");
    let refused =
        world.torpor(&["image", "build", "-t", "x", "--target", "nobody", dir.to_str().unwrap()]);
    assert!(refused.stderr.contains("no stage nobody"), "{refused:?}");
    world.has_no_machines();
}

#[test]
fn a_step_that_was_done_is_not_done_again_until_its_input_changes() {
    let world = World::start();
    let text = "FROM torpor/base\nRUN sleep 0.3; date +%N > /first\nCOPY src /src\n\
        RUN sleep 0.3; date +%N > /second; cat /src/a > /copied\nENV LAST=1\n";
    let dir = context(&world, &[("Dockerfile", text), ("src/a", "one"), ("src/b", "")]);
    let (said, id) = build(&world, &dir, &[]);
    assert!(!said.contains("CACHED"), "{said}");
    let marks = says(&world, "cat /first /second /copied");

    // The same again: no sandbox.
    let before = ever(&world);
    let (said, again) = build(&world, &dir, &[]);
    assert_eq!((again, said.matches("CACHED").count()), (id.clone(), 5), "{said}");
    assert_eq!(ever(&world), before);

    // Times of files do not matter.
    let past = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH + Duration::from_secs(9));
    fs::File::options().write(true).open(dir.join("src/a")).unwrap().set_times(past).unwrap();
    assert_eq!(build(&world, &dir, &[]).1, id);
    assert_eq!(ever(&world), before);

    // What only the configuration says needs no sandbox either.
    fs::write(dir.join("Dockerfile"), text.replace("LAST=1", "LAST=2")).unwrap();
    let (said, other) = build(&world, &dir, &[]);
    assert!(other != id && said.matches("CACHED").count() == 4, "{said}");
    assert_eq!(ever(&world), before);

    // From a changed file on everything is done again, and nothing before it.
    fs::write(dir.join("src/a"), "two").unwrap();
    let (said, _) = build(&world, &dir, &[]);
    assert_eq!(said.matches("CACHED").count(), 2, "FROM and the first RUN: {said}");
    let now = says(&world, "cat /first /second /copied");
    let (old, new): (Vec<_>, Vec<_>) = (marks.lines().collect(), now.lines().collect());
    assert_eq!(old[0], new[0]);
    assert_ne!(old[1], new[1]);
    assert_eq!(new[2], "two");

    let (said, _) = build(&world, &dir, &["--no-cache"]);
    assert!(!said.contains("CACHED"), "{said}");
    assert_ne!(says(&world, "cat /first").trim(), old[0]);

    // Another daemon knows the steps too; and they can be forgotten.
    let listed = world.torpor(&["image", "cache", "ls"]).ok();
    assert!(listed.contains("RUN sleep") && listed.contains("image FROM"), "{listed}");
    let pruned = world.torpor(&["image", "cache", "prune"]).ok();
    assert!(pruned.contains("forgotten"), "{pruned}");
    assert_eq!(world.saves_on_disk().len(), 0);
    let (said, _) = build(&world, &dir, &[]);
    assert!(!said.contains("CACHED"), "{said}");
    // A base image can go although steps stand on it.
    world.torpor(&["image", "rm", "app"]).ok();
}

#[test]
fn two_builds_of_the_same_are_the_same_image() {
    let world = World::start();
    let text = "FROM torpor/base\nCOPY --exclude=*.md . /app\nRUN mkdir -p /made/by && sha256sum /app/a > /made/by/sum \
        && ln -s sum /made/by/link\nWORKDIR /work\n";
    let dir = context(&world, &[("Dockerfile", text), ("a", "one"), ("note.md", "x")]);
    let (_, first) = build(&world, &dir, &["--no-cache"]);
    let past = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH + Duration::from_secs(9));
    fs::File::options().write(true).open(dir.join("a")).unwrap().set_times(past).unwrap();
    let (said, second) = build(&world, &dir, &["--no-cache"]);
    assert!(!said.contains("CACHED"), "{said}");
    assert_eq!(first, second);
    let (_, dated) = build(&world, &dir, &["--build-arg", "SOURCE_DATE_EPOCH=1000000000"]);
    assert_eq!(dated, first, "times are no part of the id");
    assert!(says(&world, "ls /app").starts_with("Dockerfile\na\n"));
}

#[test]
fn a_stage_from_scratch_has_only_what_is_copied_to_it() {
    let world = World::start();
    let text = "FROM torpor/base AS tools\nRUN mkdir /out && echo made > /out/file\n\
        FROM scratch\nCOPY --from=tools /out /\nCOPY --from=torpor/base /etc/os-release /etc/\n\
        COPY --chmod=600 --parents src/*.txt /\n";
    let dir = context(&world, &[("Dockerfile", text), ("src/a.txt", "a"), ("src/b.md", "b")]);
    let (first, id) = build(&world, &dir, &[]);
    assert!(!first.contains("CACHED"), "{first}");
    world.create_with("says", &["--image", "app"]);
    let files = world.get("/v1/sandboxes/says/files/list?path=/&recursive=true").json().to_string();
    for path in ["file", "etc/os-release", "src/a.txt"] {
        assert!(files.contains(&format!("{path}\"")), "{path}: {files:.2000}");
    }
    assert!(!files.contains("b.md") && !files.contains("usr/bin"), "{files:.2000}");
    world.torpor(&["rm", "says"]).ok();
    assert_eq!(build(&world, &dir, &["--no-cache"]).1, id);
}

#[test]
fn a_secret_is_seen_by_its_command_and_leaves_no_trace() {
    let mut world = World::start();
    let value = "hunter2-correct-horse-battery";
    let text = "FROM torpor/base\nRUN --mount=type=secret,id=token,required \\\n\
        --mount=type=secret,id=other --mount=type=secret,id=token,env=TOKEN \\\n\
        test \"$(cat /run/secrets/token)\" = \"$TOKEN\" && cat /run/secrets/token && \\\n\
        wc -c < /run/secrets/token > /size && stat -c %a /run/secrets/token && ! test -e /run/secrets/other\n\
        RUN test ! -e /run/secrets\n";
    let dir = context(&world, &[("Dockerfile", text)]);
    let path = dir.to_str().unwrap().to_owned();
    let refused = world.torpor(&["image", "build", "-t", "app", &path]);
    assert!(refused.stderr.contains("secret token is required"), "{refused:?}");
    let file = world.path("token");
    fs::write(&file, value).unwrap();
    let secret = format!("id=token,src={}", file.display());
    let (said, id) = build(&world, &dir, &["--secret", &secret]);
    assert!(said.contains("***") && said.contains("400") && !said.contains(value), "{said}");
    assert_eq!(says(&world, "cat /size; ls /run/secrets 2>&1 | wc -l").lines().next(), Some("29"));

    // Another value is the same step.
    fs::write(&file, "another").unwrap();
    let (said, again) = build(&world, &dir, &["--secret", &secret]);
    assert!(again == id && said.contains("CACHED"), "{said}");
    world.stop_daemon();
    fs::remove_file(&file).unwrap();
    assert_eq!(contains(&world.data_dir(), value), None);
}

#[test]
fn mounts_are_there_while_a_command_runs_and_a_cache_stays_for_the_next_build() {
    let world = World::start();
    let text = "FROM torpor/base AS tools\nRUN echo tool > /tool\nFROM torpor/base\nARG N\n\
        RUN mkdir /kept && echo own > /kept/own\n\
        RUN --mount=type=cache,target=/kept --mount=type=cache,id=new,target=/a/b/c \\\n\
        --mount=type=bind,source=src,target=/ctx --mount=from=tools,source=/tool,target=/x/tool \\\n\
        --mount=type=tmpfs,target=/t \\\n\
        ls /kept /a/b/c; echo $N >> /kept/log; echo $N >> /a/b/c/log; touch /t/x; \\\n\
        cat /kept/log /a/b/c/log /ctx/f /x/tool; echo gone > /ctx/g\n";
    let dir = context(&world, &[("Dockerfile", text), ("src/f", "file\n")]);
    let output = |said: &str| {
        let words = said.lines().filter_map(|line| line.rsplit(' ').next());
        words.map(str::to_owned).collect::<Vec<_>>().join(" ")
    };
    let (said, _) = build(&world, &dir, &["--build-arg", "N=one"]);
    assert!(output(&said).contains("one one file tool"), "{said}");
    let (said, _) = build(&world, &dir, &["--build-arg", "N=two"]);
    assert!(output(&said).contains("one two one two file tool"), "{said}");
    let left = says(&world, "ls /kept; ls -d /a /ctx /x /t 2>/dev/null | wc -l");
    assert_eq!(left, "own\n0\n");
}

#[test]
fn a_build_that_is_given_up_leaves_no_sandbox() {
    let world = World::start();
    let text = "FROM torpor/base\nRUN echo begun; sleep 1000\n";
    let dir = context(&world, &[("Dockerfile", text)]);
    let args = ["image", "build", "-t", "app", dir.to_str().unwrap()];
    let mut client = world.command(&args).stderr(Stdio::null()).spawn().unwrap();
    let running = || {
        let list = world.get("/v1/sandboxes").json();
        list["sandboxes"].as_array().unwrap().iter().any(|it| it["state"] == "running")
    };
    wait_for("the build runs", || running().then_some(()));
    // As Ctrl-C does.
    let pid = rustix::process::Pid::from_child(&client);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    client.wait().unwrap();
    wait_for("its sandbox is gone", || {
        let list = world.get("/v1/sandboxes").json();
        list["sandboxes"].as_array().unwrap().is_empty().then_some(())
    });
    world.has_no_machines();
}

#[test]
fn a_daemon_that_is_killed_in_a_build_loses_no_step_that_was_saved() {
    let mut world = World::start();
    let text = "FROM torpor/base\nRUN sleep 0.5; date +%N > /first\nRUN sleep $(cat /wait 2>/dev/null || echo 1000)\n";
    let dir = context(&world, &[("Dockerfile", text)]);
    let args = ["image", "build", "-t", "app", dir.to_str().unwrap()];
    let mut client = world.command(&args).stderr(Stdio::null()).spawn().unwrap();
    let cached = |world: &World| {
        let cache = world.get("/v1/build-cache").json();
        cache["entries"].as_array().unwrap().len()
    };
    wait_for("the first step is saved", || (cached(&world) == 1).then_some(()));
    world.kill_daemon();
    client.wait().unwrap();
    world.start_daemon();
    fs::write(dir.join("Dockerfile"), text.replace("1000", "0")).unwrap();
    let (said, _) = build(&world, &dir, &[]);
    assert_eq!(said.matches("CACHED").count(), 2, "FROM and the first RUN: {said}");
    assert_eq!(says(&world, "wc -l < /first").trim(), "1");
}
