//! Domains from their first record to their last, with a name server that is played.

use parking_lot::Mutex;
use torpor_store::Layout;

use super::*;

/// A name server that says what it is told to, of every name.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

#[async_trait]
impl Resolver for Told {
    async fn texts(&self, _: &str) -> Result<Vec<String>, String> {
        Ok(self.0.lock().clone())
    }
}

struct World {
    domains: Domains,
    ledger: Ledger,
    texts: Arc<Told>,
    _dir: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&Layout::open(dir.path()).unwrap()).await.unwrap();
        let texts = Arc::new(Told::default());
        let domains = open(&ledger, &texts).await;
        Self { domains, ledger, texts, _dir: dir }
    }

    fn say(&self, text: &str) {
        *self.texts.0.lock() = vec![text.to_owned()];
    }
}

async fn open(ledger: &Ledger, texts: &Arc<Told>) -> Domains {
    let own =
        Own { previews: "p.example.org".to_owned(), names: vec!["torpor.example.org".to_owned()] };
    let texts = Arc::clone(texts) as Arc<dyn Resolver>;
    Domains::open(ledger.clone(), own, texts, Clock::start()).await.unwrap()
}

fn name(text: &str) -> DomainName {
    text.parse().unwrap()
}

#[tokio::test]
async fn a_domain_leads_somewhere_only_with_its_own_proof() {
    let world = World::new().await;
    let preview = PreviewId::random();
    let added = world.domains.add(name("app.shop.com"), preview.clone()).await.unwrap();
    assert_eq!(world.domains.by_host("app.shop.com"), None);
    let other = world.domains.add(name("other.shop.com"), preview.clone()).await.unwrap();
    assert_ne!(added.secret, other.secret);

    world.say(&proof(&other));
    let after = world.domains.verify(&added.name).await.unwrap();
    assert_eq!(after.state, DomainState::Pending);
    let problem = after.problem.unwrap();
    assert!(problem.contains(&proof(&other)) && problem.contains(&proof(&added)), "{problem}");
    assert_eq!(world.domains.by_host("app.shop.com"), None);

    world.say(&proof(&added));
    let after = world.domains.verify(&added.name).await.unwrap();
    assert_eq!((after.state, after.problem), (DomainState::Verified, None));
    assert_eq!(world.domains.by_host("App.Shop.com."), Some(preview));
    assert_eq!(world.domains.by_host("x.app.shop.com"), None);
    assert_eq!(world.domains.by_host("other.shop.com"), None);
}

#[tokio::test]
async fn what_is_verified_survives_a_restart() {
    let world = World::new().await;
    let preview = PreviewId::random();
    let added = world.domains.add(name("*.shop.com"), preview.clone()).await.unwrap();
    world.say(&proof(&added));
    world.domains.verify(&added.name).await.unwrap();
    let again = open(&world.ledger, &world.texts).await;
    assert_eq!(again.by_host("any.shop.com"), Some(preview));
    assert_eq!(again.by_host("shop.com"), None);
    assert_eq!(again.by_host("a.b.shop.com"), None);
}

#[tokio::test]
async fn a_name_of_the_daemon_itself_is_never_a_domain() {
    let world = World::new().await;
    let preview = PreviewId::random();
    for own in ["torpor.example.org", "p.example.org", "x.p.example.org", "*.p.example.org"] {
        let refused = world.domains.add(name(own), preview.clone()).await;
        assert!(matches!(refused, Err(Refused::Own(_))), "{own}");
    }
    // A star that covers them does not take them away.
    let star = world.domains.add(name("*.example.org"), preview.clone()).await.unwrap();
    world.say(&proof(&star));
    world.domains.verify(&star.name).await.unwrap();
    assert_eq!(world.domains.by_host("shop.example.org"), Some(preview));
    for own in ["torpor.example.org", "p.example.org", "x.p.example.org"] {
        assert_eq!(world.domains.by_host(own), None, "{own}");
    }
}

#[tokio::test]
async fn a_domain_is_added_once_and_removed_once() {
    let world = World::new().await;
    let row = world.domains.add(name("a.shop.com"), PreviewId::random()).await.unwrap();
    let again = world.domains.add(row.name.clone(), PreviewId::random()).await;
    assert!(matches!(again, Err(Refused::Taken(_))));
    world.domains.remove(&row.name).await.unwrap();
    assert!(matches!(world.domains.remove(&row.name).await, Err(Refused::NoSuchDomain(_))));
    assert!(matches!(world.domains.verify(&row.name).await, Err(Refused::NoSuchDomain(_))));
}

#[tokio::test]
async fn a_domain_goes_with_its_preview() {
    let world = World::new().await;
    let (kept, gone) = (PreviewId::random(), PreviewId::random());
    world.domains.add(name("kept.shop.com"), kept.clone()).await.unwrap();
    world.domains.add(name("gone.shop.com"), gone).await.unwrap();
    world.domains.sweep(|preview| *preview == kept).await.unwrap();
    let left: Vec<_> = world.domains.list().into_iter().map(|row| row.name).collect();
    assert_eq!(left, [name("kept.shop.com")]);
    assert_eq!(world.ledger.domains(None, 9).await.unwrap().len(), 1);
}
