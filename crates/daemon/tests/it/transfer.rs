//! Bytes in and out, of any size.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Method, Request};
use http_body_util::StreamBody;
use hyper::body::Frame;

use crate::client::{self, encoded};
use crate::world::{World, until};

const FILES: &str = "/v1/sandboxes/web/files";

fn noise(bytes: usize) -> Bytes {
    let mut data = vec![0; bytes];
    blake3::Hasher::new().finalize_xof().fill(&mut data);
    data.into()
}

#[tokio::test]
async fn a_large_file_goes_in_and_comes_out_as_it_was() {
    let world = World::with_sandbox().await;
    let data = noise(64 << 20);
    let path = format!("{FILES}/content?path={}&mode=0640", world.query("big"));
    let entry = world.put(&path, data.clone()).await.expect(200);
    assert_eq!(entry["size"], data.len());
    let path = format!("{FILES}/content?path={}", world.query("big"));
    let back = world.get(&path).await;
    assert_eq!(back.header("content-length"), data.len().to_string());
    assert_eq!(back.header("x-torpor-mode"), "0640");
    assert_eq!(blake3::hash(&back.body), blake3::hash(&data));
    let metrics = world.get("/metrics").await.text();
    let moved = format!("torpor_transferred_bytes_total{{direction=\"up\"}} {}", data.len());
    assert!(metrics.contains(&moved), "{metrics}");
}

#[tokio::test]
async fn a_part_of_a_file_can_be_read() {
    let world = World::with_sandbox().await;
    std::fs::write(world.dir.join("f"), "0123456789").unwrap();
    let read = async |query: &str| {
        world.get(&format!("{FILES}/content?path={}{query}", world.query("f"))).await.text()
    };
    assert_eq!(read("&offset=3&length=4").await, "3456");
    assert_eq!(read("&offset=8").await, "89");
    assert_eq!(read("&offset=8&length=100").await, "89");
    assert_eq!(read("&offset=100").await, "");
    assert_eq!(read("&length=0").await, "");
}

#[tokio::test]
async fn the_head_of_a_file_says_its_size() {
    let world = World::with_sandbox().await;
    std::fs::write(world.dir.join("f"), "0123456789").unwrap();
    let path = format!("{FILES}/content?path={}", world.query("f"));
    let head = client::send(world.address, client::request(Method::HEAD, &path, "")).await;
    assert_eq!((head.status.as_u16(), head.header("content-length")), (200, "10"));
    assert!(head.body.is_empty());
}

#[tokio::test]
async fn files_that_only_claim_to_be_empty_are_read() {
    let world = World::with_sandbox().await;
    let version = world.get(&format!("{FILES}/content?path=/proc/version")).await;
    assert!(version.text().contains("Linux"), "{version:?}");
    std::fs::write(world.dir.join("empty"), "").unwrap();
    let empty = world.get(&format!("{FILES}/content?path={}", world.query("empty"))).await;
    assert_eq!((empty.header("content-length"), empty.body.len()), ("0", 0));
}

#[tokio::test]
async fn what_is_no_file_is_not_read() {
    let world = World::with_sandbox().await;
    let dir = encoded(world.dir.to_str().unwrap());
    world.get(&format!("{FILES}/content?path={dir}")).await.expect_error(422, "file_refused");
    let missing = world.get(&format!("{FILES}/content?path={dir}/none")).await;
    let error = missing.expect_error(404, "file_not_found");
    assert!(error["message"].as_str().unwrap().contains("none"), "{error}");
}

#[tokio::test]
async fn appending_adds_to_the_end() {
    let world = World::with_sandbox().await;
    let path = format!("{FILES}/content?path={}&append=true", world.query("log"));
    world.put(&path, "one\n").await.expect(200);
    assert_eq!(world.put(&path, "two\n").await.expect(200)["size"], 8);
    assert_eq!(std::fs::read_to_string(world.dir.join("log")).unwrap(), "one\ntwo\n");
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_the_old_file() {
    let world = World::with_sandbox().await;
    let file = world.dir.join("f");
    std::fs::write(&file, "old").unwrap();
    let before = std::fs::read_dir(&world.dir).unwrap().count();
    let parts = stream::iter((0..32).map(|_| noise(128 << 10))).chain(stream::pending());
    let parts = parts.map(|part| Ok::<_, std::io::Error>(Frame::data(part)));
    let path = format!("{FILES}/content?path={}", world.query("f"));
    let request = Request::put(path).body(StreamBody::new(Box::pin(parts))).unwrap();
    let upload = tokio::spawn(client::send(world.address, request));
    until("it arrives", || std::fs::read_dir(&world.dir).unwrap().count() > before).await;
    upload.abort();
    until("it is given up", || std::fs::read_dir(&world.dir).unwrap().count() == before).await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "old");
}

#[tokio::test]
async fn an_upload_that_can_not_be_written_is_told_why_before_its_end() {
    let world = World::with_sandbox().await;
    let parts = stream::iter((0..4).map(|_| noise(128 << 10))).chain(stream::pending());
    let parts = parts.map(|part| Ok::<_, std::io::Error>(Frame::data(part)));
    let request = Request::put(format!("{FILES}/content?path=/proc/no/f"));
    let request = request.body(StreamBody::new(Box::pin(parts))).unwrap();
    let answer = client::send(world.address, request).await;
    assert!(answer.status.is_client_error(), "{answer:?}");
    assert!(answer.json()["message"].as_str().unwrap().contains("/proc/no"), "{answer:?}");
}

#[tokio::test]
async fn a_slow_reader_does_not_hold_up_the_sandbox() {
    let world = World::with_sandbox().await;
    std::fs::write(world.dir.join("big"), noise(32 << 20)).unwrap();
    let mut slow = world.open(&format!("{FILES}/content?path={}", world.query("big"))).await;
    slow.part().await.unwrap();
    let quick = tokio::time::timeout(Duration::from_secs(10), world.sh("echo hi")).await;
    assert_eq!(quick.unwrap()["stdout"], "hi\n");
}

#[tokio::test]
async fn a_directory_goes_out_and_in_as_a_tar() {
    let world = World::with_sandbox().await;
    std::fs::create_dir_all(world.dir.join("d/sub")).unwrap();
    std::fs::write(world.dir.join("d/sub/f"), "hello").unwrap();
    let mode = std::fs::Permissions::from_mode(0o751);
    std::fs::set_permissions(world.dir.join("d/sub/f"), mode).unwrap();
    let archive = world.get(&format!("{FILES}/archive?path={}", world.query("d"))).await;
    assert_eq!(archive.header("content-type"), "application/x-tar");
    let mut names: Vec<_> = tar::Archive::new(&archive.body[..])
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    assert_eq!(names.last().unwrap(), "d/sub/f");
    let put = format!("{FILES}/archive?path={}", world.query("copy"));
    world.put(&put, archive.body).await.expect(204);
    let copy = world.dir.join("copy/d/sub/f");
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), "hello");
    assert_eq!(std::fs::metadata(copy).unwrap().permissions().mode() & 0o7777, 0o751);
}

#[tokio::test]
async fn garbage_is_no_tar() {
    let world = World::with_sandbox().await;
    let put = format!("{FILES}/archive?path={}", world.query("copy"));
    let answer = world.put(&put, noise(4096)).await;
    assert!(answer.status.is_client_error(), "{answer:?}");
}
