//! Files in and out.

use std::fs;
use std::io::Write;
use std::net::TcpStream;

use torpor_e2e::{World, request, wait_for};

fn random_file(path: &std::path::Path, mib: usize) {
    let urandom = fs::File::open("/dev/urandom").unwrap();
    let mut limited = std::io::Read::take(urandom, (mib as u64) << 20);
    std::io::copy(&mut limited, &mut fs::File::create(path).unwrap()).unwrap();
}

#[test]
fn a_file_and_a_directory_come_back_as_they_went() {
    let world = World::start();
    world.create("web");
    let project = world.path("project");
    fs::create_dir_all(project.join("src/deep")).unwrap();
    random_file(&project.join("src/data.bin"), 20);
    fs::write(project.join("src/deep/run.sh"), "#!/bin/sh\necho hi\n").unwrap();
    std::os::unix::fs::symlink("data.bin", project.join("src/link")).unwrap();
    fs::set_permissions(
        project.join("src/deep/run.sh"),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();

    world.torpor(&["cp", project.to_str().unwrap(), "web:/workspace"]).ok();
    assert_eq!(world.sh("web", "/workspace/project/src/deep/run.sh").ok(), "hi\n");
    let back = world.path("back");
    world.torpor(&["cp", "web:/workspace/project", back.to_str().unwrap()]).ok();
    let same =
        std::process::Command::new("diff").arg("-r").args([&project, &back]).status().unwrap();
    assert!(same.success());
    assert_eq!(fs::read_link(back.join("src/link")).unwrap().to_str(), Some("data.bin"));

    world.sh("web", "echo '{}' >/workspace/out.json").ok();
    let out = world.path("out.json");
    world.torpor(&["cp", "web:/workspace/out.json", out.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(out).unwrap(), "{}\n");
}

#[test]
fn a_hundred_megabytes_go_both_ways_through_the_api() {
    let world = World::start();
    world.create("web");
    let file = world.path("big");
    random_file(&file, 100);
    let bytes = fs::read(&file).unwrap();
    let path = "/v1/sandboxes/web/files/content?path=/tmp/big";
    let sent = request(world.address(), "PUT", path, "", &bytes);
    assert_eq!(sent.status, 200, "{}", sent.text());
    assert!(world.get(path).body == bytes, "what came back differs");
}

#[test]
fn hostile_paths_are_refused_or_stay_inside() {
    let world = World::start();
    world.create("web");
    let put = |path: &str| {
        let path = format!("/v1/sandboxes/web/files/content?path={path}");
        request(world.address(), "PUT", &path, "", b"x").status
    };
    assert_eq!(put("/tmp/../../../../tmp/inside"), 200);
    assert_eq!(world.sh("web", "cat /tmp/inside").ok(), "x");
    assert!(!std::path::Path::new("/tmp/inside").exists());
    assert_eq!(put("/tmp/a%00b"), 400);
    assert_eq!(put("relative"), 400);
    assert_eq!(put("/tmp/new%0Aline"), 200);
    assert!(put(&format!("/tmp/{}", "x".repeat(4096))) >= 400);
    world.sh("web", "ln -s /etc/passwd /tmp/pw; mkfifo /tmp/fifo").ok();
    let read = world.get("/v1/sandboxes/web/files/content?path=/tmp/pw");
    assert!(read.text().contains("tl-user"), "a link leads to the guest's own file");
    assert_eq!(world.get("/v1/sandboxes/web/files/content?path=/tmp/fifo").status, 400);
    assert_eq!(world.get("/v1/sandboxes/web/files/content?path=/no/such").status, 404);
}

#[test]
fn an_upload_cut_short_leaves_the_old_file() {
    let world = World::start();
    world.create("web");
    world.sh("web", "mkdir /up; echo old >/up/f").ok();
    let mut socket = TcpStream::connect(world.address()).unwrap();
    write!(
        socket,
        "PUT /v1/sandboxes/web/files/content?path=/up/f HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nnew"
    )
    .unwrap();
    wait_for("the upload to begin", || {
        (world.sh("web", "ls -A /up | wc -l").stdout.trim() != "1").then_some(())
    });
    drop(socket);
    wait_for("the upload to be given up", || {
        (world.sh("web", "ls -A /up | wc -l").stdout.trim() == "1").then_some(())
    });
    assert_eq!(world.sh("web", "cat /up/f").ok(), "old\n");
}
