//! gateway add, ls, show, diff, approve, reject, client, tokens, tail, rm.

use crate::world::World;

/// Listing it asks nobody.
const API: &str = r#"{"openapi": "3.1.0", "info": {"title": "Shop", "version": "1"}, "paths": {"/pets": {
    "get": {"operationId": "list_pets", "summary": "Lists pets"},
    "delete": {"operationId": "remove_pets", "summary": "Removes pets"}}}}"#;

#[test]
fn an_api_is_added_looked_at_approved_and_given_to_a_client() {
    let world = World::new();
    let file = world.here.join("shop.json");
    std::fs::write(&file, API).unwrap();
    let file = file.to_str().unwrap();
    let add = ["gateway", "add", "shop", "--url", "https://shop.example", "--openapi", file];
    let added = world.torpor(add);
    assert!(added.stderr.contains("torpor gateway diff shop"), "{added:?}");
    let diff = world.torpor(["gateway", "diff", "shop"]);
    assert_eq!(diff.code, 1, "{diff:?}");
    assert!(diff.stdout.contains("=== tool list_pets (new)"), "{diff:?}");
    assert!(diff.stdout.contains("DELETE /pets"), "a request is shown with its tool: {diff:?}");
    let digest = diff.stdout.trim_end().rsplit(' ').next().unwrap();
    let approve = ["gateway", "approve", "shop", "--tool", "list_pets", "--digest", digest];
    world.torpor(approve).ok();
    world.torpor(["gateway", "reject", "shop", "--tool", "remove_pets"]).ok();
    let shown = world.torpor(["gateway", "show", "shop", "--json"]).json();
    assert_eq!((&shown["approved"], &shown["held"]), (&2.into(), &1.into()), "{shown}");
    let (code, why) = world.torpor(["gateway", "approve", "shop", "--digest", "other"]).failed();
    assert!(code != 0 && why.contains("torpor gateway diff shop"), "{why}");
    assert!(world.torpor(["gateway", "ls"]).ok().contains("Shop 1"));

    let set =
        ["gateway", "client", "set", "root", "--upstream", "shop", "--rate", "30", "--search"];
    assert!(world.torpor(set).ok().contains("shop_*"));
    let clients = world.torpor(["gateway", "client", "ls", "--json"]).json();
    assert_eq!(clients["clients"][0]["policy"]["rules"][0]["calls_per_minute"], 30, "{clients}");
    let tokens = world.torpor(["gateway", "tokens"]).ok();
    assert!(tokens.contains("search mode") && tokens.contains("shop"), "{tokens}");
    world.torpor(["gateway", "client", "rm", "root"]).ok();
    assert_eq!(world.torpor(["gateway", "tail"]).ok(), "");
    world.torpor(["gateway", "rm", "shop"]).ok();
    let (_, why) = world.torpor(["gateway", "show", "shop"]).failed();
    assert!(why.contains("there is no MCP server shop"), "{why}");
}
