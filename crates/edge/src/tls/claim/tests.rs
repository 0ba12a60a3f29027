//! Which names lead to an order, and above all which do not.

use torpor_lifecycle::Clock;
use torpor_protocol::domain::DomainState;
use torpor_service::domains::Own;
use torpor_store::{DomainRow, Layout, Ledger};

use super::*;
use crate::dns::Resolver;

/// Claims of a daemon with one preview, `shop`, and these domains, verified or not.
async fn claims(wildcards: bool, domains: &[(&str, DomainState)]) -> (tempfile::TempDir, Claims) {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(&Layout::open(dir.path()).unwrap()).await.unwrap();
    for (name, state) in domains {
        let row = DomainRow {
            name: name.parse().unwrap(),
            preview: PreviewId::random(),
            state: *state,
            secret: "s".to_owned(),
            problem: None,
            checked_at_ms: None,
            proven_at_ms: None,
            created_at_ms: 0,
        };
        ledger.add_domain(&row).await.unwrap();
    }
    let own = Own { previews: "p.example.org".to_owned(), names: Vec::new() };
    let resolver = Arc::new(Resolver::new(None));
    let domains = Domains::open(ledger, own, resolver, Clock::start()).await.unwrap();
    let claims = Claims {
        names: vec!["torpor.example.org".to_owned()],
        previews: "p.example.org".to_owned(),
        wildcards,
        existing: Existing {
            by_label: Box::new(|label| label == "shop"),
            by_id: Box::new(|_| true),
        },
        domains: Arc::new(domains),
    };
    (dir, claims)
}

const STRANGE: [&str; 12] = [
    "",
    "localhost",
    "example.org",
    "evil.example.com",
    "unknown.p.example.org",
    "3000-web.p.example.org",
    "a.shop.p.example.org",
    "shop.p.example.org.evil.com",
    "shopp.example.org",
    ".p.example.org",
    "*.p.example.org",
    "127.0.0.1",
];

#[tokio::test]
async fn no_name_that_a_stranger_makes_up_leads_to_an_order() {
    use DomainState::{Failed, Pending};
    let unproven =
        [("pending.com.au", Pending), ("failed.com.au", Failed), ("*.wide.com", Pending)];
    let (_dir, claims) = claims(false, &unproven).await;
    for host in STRANGE.iter().chain(&["pending.com.au", "failed.com.au", "x.wide.com"]) {
        assert_eq!(claims.certificate(host), None, "{host}");
    }
}

#[tokio::test]
async fn our_own_names_previews_and_verified_domains_get_one_each() {
    let (_dir, claims) = claims(false, &[("app.shop.com", DomainState::Verified)]).await;
    for host in ["torpor.example.org", "p.example.org", "shop.p.example.org", "app.shop.com"] {
        assert_eq!(claims.certificate(host).as_deref(), Some(host));
        assert!(claims.wants(host), "{host}");
    }
    assert_eq!(claims.always(), ["torpor.example.org"]);
    assert!(!claims.wants("*.p.example.org") && !claims.wants("gone.p.example.org"));
}

#[tokio::test]
async fn without_a_hook_a_domain_with_a_star_gets_no_certificate() {
    let (_dir, claims) = claims(false, &[("*.shop.com", DomainState::Verified)]).await;
    assert_eq!(claims.certificate("any.shop.com"), None);
    assert!(!claims.wants("*.shop.com"));
}

#[tokio::test]
async fn with_a_hook_one_certificate_does_for_all_names_below_a_domain() {
    let verified = [("*.shop.com", DomainState::Verified)];
    let (_dir, claims) = claims(true, &verified).await;
    for host in ["shop.p.example.org", "unknown.p.example.org", "3000-web.p.example.org"] {
        assert_eq!(claims.certificate(host).as_deref(), Some("*.p.example.org"), "{host}");
    }
    assert_eq!(claims.certificate("any.shop.com").as_deref(), Some("*.shop.com"));
    assert_eq!(claims.certificate("a.b.p.example.org"), None);
    let always = claims.always();
    assert_eq!(always, ["torpor.example.org", "*.p.example.org", "*.shop.com"]);
    assert!(always.iter().all(|name| claims.wants(name)));
}

#[tokio::test]
async fn a_domain_whose_preview_is_gone_gets_no_certificate() {
    let (_dir, mut claims) = claims(false, &[("app.shop.com", DomainState::Verified)]).await;
    claims.existing.by_id = Box::new(|_| false);
    assert_eq!(claims.certificate("app.shop.com"), None);
}
