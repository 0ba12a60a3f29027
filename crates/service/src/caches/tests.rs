//! Two nodes with the same ledger, each with caches of its own.

use async_trait::async_trait;
use tempfile::TempDir;
use torpor_lifecycle::Clock;
use torpor_protocol::PreviewId;
use torpor_store::{Layout, Ledger};

use super::*;
use crate::domains::{Domains, Own, Resolver};
use crate::keys::{KeySettings, Keyring};

struct Node {
    dir: TempDir,
    ledger: Ledger,
}

impl Node {
    async fn first() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&Layout::open(dir.path()).unwrap()).await.unwrap();
        Self { dir, ledger }
    }

    /// Another node, whose ledger is this one's.
    async fn other(&self) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::open(dir.path()).unwrap();
        let shared = self.dir.path().join("ledger.db");
        std::os::unix::fs::symlink(shared, dir.path().join("ledger.db")).unwrap();
        Self { ledger: Ledger::open(&layout).await.unwrap(), dir }
    }

    async fn keys(&self) -> Keyring {
        Keyring::open(self.ledger.clone(), KeySettings::default()).await.unwrap()
    }

    async fn domains(&self) -> Domains {
        let own = Own { previews: "p.example.org".to_owned(), names: Vec::new() };
        Domains::open(self.ledger.clone(), own, Arc::new(Nobody), Clock::start()).await.unwrap()
    }
}

struct Nobody;

#[async_trait]
impl Resolver for Nobody {
    async fn texts(&self, _: &str) -> Result<Vec<String>, String> {
        Ok(Vec::new())
    }
}

#[tokio::test]
async fn a_key_of_another_node_counts_here_and_is_revoked_here_too() {
    let here = Node::first().await;
    let there = here.other().await;
    let (mine, theirs) = (here.keys().await, there.keys().await);
    assert!(!mine.required());
    let (row, secret) = theirs.create("laptop").await.unwrap();
    mine.refresh().await.unwrap();
    assert!(mine.required());
    assert!(mine.knows(&secret).await.unwrap());
    theirs.revoke(&row.id).await.unwrap();
    assert!(!theirs.knows(&secret).await.unwrap());
    mine.refresh().await.unwrap();
    assert!(!mine.knows(&secret).await.unwrap());
    assert!(mine.required(), "from the first key on");
}

#[tokio::test]
async fn a_domain_of_another_node_shows_here_until_it_is_removed_there() {
    let here = Node::first().await;
    let there = here.other().await;
    let (mine, theirs) = (here.domains().await, there.domains().await);
    let own = mine.add("b.shop.com".parse().unwrap(), PreviewId::random()).await.unwrap();
    let added = theirs.add("a.shop.com".parse().unwrap(), PreviewId::random()).await.unwrap();
    assert!(mine.get(&added.name).is_err());
    mine.refresh().await.unwrap();
    assert_eq!(mine.list(), [added.clone(), own.clone()]);
    theirs.remove(&added.name).await.unwrap();
    mine.refresh().await.unwrap();
    assert_eq!(mine.list(), [own]);
}

#[tokio::test]
async fn own_changes_are_no_reason_to_read_again() {
    let here = Node::first().await;
    let mine = here.domains().await;
    let own = mine.add("b.shop.com".parse().unwrap(), PreviewId::random()).await.unwrap();
    // Behind the cache's back, as this node: nothing tells it.
    assert!(here.ledger.drop_domain(&own.name).await.unwrap());
    mine.refresh().await.unwrap();
    assert_eq!(mine.list(), [own]);
}
