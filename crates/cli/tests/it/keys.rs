//! key create, ls, rm.

use crate::world::{World, finish};

#[test]
fn from_the_first_key_on_a_key_is_needed() {
    let world = World::new();
    let done = world.torpor(["key", "create", "ci"]);
    let secret = done.stdout.trim().to_owned();
    assert!(secret.starts_with("tpk_"), "{done:?}");
    assert!(done.stderr.contains("it is not shown again"), "{done:?}");

    let (code, words) = world.torpor(["ps"]).failed();
    assert_eq!(code, 1);
    assert!(words.contains("\nhint: "), "{words}");

    let mut with_key = world.command(["key", "ls"]);
    with_key.env("TORPOR_API_KEY", &secret);
    let table = world.runtime().block_on(finish(with_key, b"")).ok();
    assert!(!table.contains(&secret), "the secret is shown again");
    let id = table.lines().nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let args = ["--api-key", &secret, "key", "rm", &id];
    assert_eq!(world.torpor(args).ok(), format!("{id}\n"));
}
