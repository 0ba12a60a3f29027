//! `/api/v1/files`.

use serde_json::{Value, json};

use super::{Place, form};
use crate::client::Answer;

impl Place {
    async fn put(&self, path: &str, bytes: impl Into<Vec<u8>>) -> Answer {
        self.send(self.ask("PUT", &format!("/files?path={}", form(path))).raw(bytes)).await
    }

    async fn read(&self, path: &str) -> Answer {
        self.get(&format!("/files?path={}", form(path))).await
    }

    async fn remove(&self, path: &str) -> Answer {
        self.delete(&format!("/files?path={}", form(path))).await
    }

    async fn list(&self, path: &str) -> Answer {
        self.get(&format!("/files/list?path={}", form(path))).await
    }
}

#[tokio::test]
async fn a_file_is_written_with_the_directories_above_it_and_read_as_it_is() {
    let place = Place::new().await;
    let path = place.path("new/dir/a b+ä.bin");
    let content: Vec<u8> = (0..5_000_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    place.put(&path, content.clone()).await.expect(204);
    assert_eq!(std::fs::read(&path).unwrap(), content);
    let answer = place.read(&path).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "application/octet-stream");
    assert_eq!(answer.header("content-length"), "5000000");
    assert!(answer.body == content);
    place.put(&path, "").await.expect(204);
    assert_eq!(place.read(&path).await.text(), "");
    place.remove(&path).await.expect(204);
    assert!(!std::path::Path::new(&path).exists());
}

#[tokio::test]
async fn a_plus_in_a_query_is_a_space() {
    let place = Place::new().await;
    std::fs::write(place.path("a b"), "content").unwrap();
    let query = form(&place.path("a b"));
    assert!(query.ends_with("a+b"));
    assert_eq!(place.get(&format!("/files?path={query}")).await.text(), "content");
}

#[tokio::test]
async fn a_path_that_is_not_absolute_begins_at_the_root() {
    let place = Place::new().await;
    let path = place.path("f");
    place.put(path.trim_start_matches('/'), "content").await.expect(204);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "content");
}

#[tokio::test]
async fn what_is_not_there_or_no_file_is_told_apart() {
    let place = Place::new().await;
    let (dir, missing) = (place.path(""), place.path("missing"));
    std::fs::write(place.path("f"), "content").unwrap();
    place.read(&missing).await.expect_error(404, "NOT_FOUND");
    place.remove(&missing).await.expect_error(404, "NOT_FOUND");
    place.list(&missing).await.expect_error(404, "NOT_FOUND");
    place.read(&dir).await.expect_error(400, "IS_DIRECTORY");
    place.remove(&dir).await.expect_error(400, "IS_DIRECTORY");
    place.put(&place.path("sub/f"), "x").await.expect(204);
    place.put(&place.path("sub"), "x").await.expect_error(400, "IS_DIRECTORY");
    place.remove(&place.path("sub")).await.expect_error(400, "IS_DIRECTORY");
    place.list(&place.path("f")).await.expect_error(400, "NOT_A_DIRECTORY");
    place.read(&place.path("f/g")).await.expect_error(400, "NOT_A_DIRECTORY");
    place.put("/sys/torpor-test", "x").await.expect_error(403, "PERMISSION_DENIED");
    place.read("").await.expect_error(400, "INVALID_REQUEST");
    place.get("/files").await.expect_error(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_listing_is_sorted_and_says_what_is_what() {
    let place = Place::new().await;
    for name in ["b", "a.txt", "c/d"] {
        place.put(&place.path(name), "four").await.expect(204);
    }
    let listing = place.list(&place.path("")).await.expect(200);
    assert_eq!(listing["path"], place.path(""));
    let entries = listing["entries"].as_array().unwrap();
    let shown: Vec<_> =
        entries.iter().map(|it| json!([it["name"], it["is_dir"], it["size"]])).collect();
    let expected = [json!(["a.txt", false, 4]), json!(["b", false, 4]), json!(["c", true, null])];
    assert_eq!(shown, expected);
    let recent = |at: &Value| at.as_u64().is_some_and(|ms| ms > 1_500_000_000_000);
    assert!(entries.iter().all(|entry| recent(&entry["modified_at"])), "{listing}");
}
