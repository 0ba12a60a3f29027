//! `torpor domain`

use crate::world::World;

#[test]
fn a_domain_is_added_listed_and_removed() {
    let world = World::with_sandbox();
    world.torpor(["preview", "create", "web", "3000", "--public"]).ok();
    let preview = "web/port-3000";
    let added = world.torpor(["domain", "add", "app.shop.com", "--preview", preview]);
    assert!(added.stderr.contains("torpor domain verify app.shop.com"), "{}", added.stderr);
    let records = added.ok();
    assert!(records.contains("_torpor.app.shop.com"), "{records}");
    assert!(records.contains("torpor-verify="), "{records}");
    let list = world.torpor(["domain", "ls"]).ok();
    let line = list.lines().nth(1).unwrap();
    assert!(line.contains("app.shop.com") && line.contains("pending"), "{list}");
    assert!(line.contains(preview), "{list}");
    let again = world.torpor(["domain", "add", "app.shop.com", "--preview", preview]).failed();
    assert!(again.1.contains("added already"), "{}", again.1);
    assert_eq!(world.torpor(["domain", "rm", "app.shop.com"]).ok(), "app.shop.com\n");
    world.torpor(["domain", "rm", "--force", "app.shop.com"]).ok();
    let (code, said) = world.torpor(["domain", "rm", "app.shop.com"]).failed();
    assert!(code == 1 && said.contains("app.shop.com"), "{said}");
}

#[test]
fn a_domain_that_makes_no_sense_is_refused_before_anybody_is_asked() {
    let world = World::with_sandbox();
    for (domain, preview) in [("shop", "web/x"), ("a.localhost", "web/x"), ("a.shop.com", "web")] {
        let (code, said) = world.torpor(["domain", "add", domain, "--preview", preview]).failed();
        assert_eq!(code, 2, "{said}");
    }
}
