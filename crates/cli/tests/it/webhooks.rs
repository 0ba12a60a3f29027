//! webhook create, ls, show, update, test, deliveries, redeliver, rotate, rm.

use torpor_daemon::Config;

use crate::world::World;

#[test]
fn a_webhook_is_made_shown_changed_tested_and_removed() {
    let mut config = Config::default();
    config.egress.outgoing = vec!["127.0.0.0/8".parse().unwrap()];
    let world = World::with(config);
    // Nobody listens there.
    let made = world.torpor(["webhook", "create", "http://127.0.0.1:1/", "--label", "team=blue"]);
    let fields = |text: &str| -> [String; 2] {
        let mut last = text.lines().map(|line| line.split_whitespace().last().unwrap().to_owned());
        [last.next().unwrap(), last.next().unwrap()]
    };
    let [id, secret] = fields(&made.ok());
    assert!(id.starts_with("webhook-") && secret.starts_with("whsec_"), "{id} {secret}");
    let row = |args: &[&str]| {
        let table = world.torpor(args.iter().copied()).ok();
        table.lines().nth(1).unwrap_or_default().to_owned()
    };
    let listed = row(&["webhook", "ls"]);
    assert!(listed.contains(&id) && listed.contains("enabled"), "{listed}");
    assert!(!listed.contains(&secret), "{listed}");

    let update = ["webhook", "update", &id, "--type", "sandbox.ended", "--disable"];
    assert_eq!(world.torpor(update).ok(), format!("{id}\n"));
    let shown = world.torpor(["webhook", "show", &id]).ok();
    assert!(shown.contains("sandbox.ended") && shown.contains("disabled"), "{shown}");
    let (code, words) = world.torpor(["webhook", "test", &id]).failed();
    assert!(code == 1 && words.contains("--enable"), "{words}");
    let (code, words) =
        world.torpor(["webhook", "update", &id, "--type", "invocation.finished"]).failed();
    assert!(code == 1 && words.contains("callbacks are told"), "{words}");
    world.torpor(["webhook", "update", &id, "--enable", "--all-types"]).ok();

    let delivery = world.torpor(["webhook", "test", &id]).ok().trim().to_owned();
    let sent = row(&["webhook", "deliveries", &id]);
    assert!(sent.contains(&delivery) && sent.contains("webhook.test"), "{sent}");
    let again = world.torpor(["webhook", "redeliver", &id, &delivery]).ok();
    assert_eq!(again.trim(), delivery);
    let [same, other] = fields(&world.torpor(["webhook", "rotate", &id]).ok());
    assert!(same == id && other.starts_with("whsec_") && other != secret);

    world.torpor(["webhook", "rm", &id]).ok();
    assert_eq!(row(&["webhook", "ls"]), "");
    let (code, words) = world.torpor(["webhook", "deliveries", &id]).failed();
    assert!(code != 0 && words.contains("no webhook"), "{words}");
}
