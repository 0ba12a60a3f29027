//! pool create, ls, show, rm.

use serde_json::{Value, json};
use torpor_protocol::ErrorCode;

use crate::stub::{Stub, done, ok, refuse};

fn pool(name: &str) -> Value {
    json!({
        "name": name, "size": 4, "ready": 3, "image": "torpor/base", "snapshot": null,
        "resources": {}, "network": {}, "hits": 9, "misses": 1, "reason": "no memory is left"
    })
}

fn stub() -> Stub {
    Stub::new(|asked| match asked.what.as_str() {
        "POST /v1/pools" | "GET /v1/pools/plain" => Some(ok(pool("plain"))),
        "GET /v1/pools" => Some(ok(json!({"pools": [pool("plain")]}))),
        "DELETE /v1/pools/plain" => Some(done()),
        _ => Some(refuse(404, ErrorCode::NotFound, "there is no such pool")),
    })
}

#[test]
fn a_pool_is_made_listed_shown_and_removed() {
    let stub = stub();
    let args = ["pool", "create", "plain", "--size", "4", "--memory", "512m"];
    assert_eq!(stub.torpor(args).ok(), "plain\n");
    let asked = stub.body_of("POST /v1/pools");
    assert_eq!((&asked["size"], &asked["memory_mib"]), (&json!(4), &json!(512)));
    assert_eq!(asked["network"]["internet"], true);
    let table = stub.torpor(["pool", "ls"]).ok();
    assert_eq!(
        table,
        "NAME    READY   FROM          CPUS   MEM     HITS\n\
         plain   3/4     torpor/base   1      1 GiB   90% of 10\n"
    );
    let shown = stub.torpor(["pool", "show", "plain"]).ok();
    assert!(shown.contains("last refill: failed: no memory is left\n"), "{shown}");
    assert_eq!(stub.torpor(["pool", "rm", "-f", "nope", "plain"]).ok(), "plain\n");
    assert_eq!(stub.torpor(["pool", "rm", "nope"]).failed().0, 1);
}

#[test]
fn a_pool_is_of_an_image_or_of_a_snapshot() {
    let stub = stub();
    let both = ["pool", "create", "p", "--size", "1", "--image", "a", "--snapshot", "b"];
    assert_eq!(stub.torpor(both).code, 2);
    assert_eq!(stub.torpor(["pool", "create", "p"]).code, 2);
    assert_eq!(stub.asked(), [""; 0]);
}
