//! Domains.

use torpor_protocol::PreviewId;
use torpor_protocol::domain::DomainState;

use super::*;
use crate::{DomainLedger as _, DomainRow};

fn row(name: &str) -> DomainRow {
    DomainRow {
        name: name.parse().unwrap(),
        preview: PreviewId::random(),
        state: DomainState::Pending,
        secret: "s".to_owned(),
        problem: None,
        checked_at_ms: None,
        proven_at_ms: None,
        created_at_ms: 7,
    }
}

#[tokio::test]
async fn a_domain_belongs_to_who_was_first_until_it_is_removed() {
    let ledger = world().await.ledger;
    let first = row("a.example.org");
    assert!(ledger.add_domain(&first).await.unwrap());
    assert!(!ledger.add_domain(&row("a.example.org")).await.unwrap());
    assert_eq!(ledger.domains(None, 9).await.unwrap(), std::slice::from_ref(&first));
    assert!(ledger.drop_domain(&first.name).await.unwrap());
    assert!(!ledger.drop_domain(&first.name).await.unwrap());
}

#[tokio::test]
async fn a_verdict_about_a_domain_that_was_added_anew_changes_nothing() {
    let ledger = world().await.ledger;
    let old = row("a.example.org");
    let new = DomainRow { secret: "another".to_owned(), ..row("a.example.org") };
    ledger.add_domain(&new).await.unwrap();
    let verdict = DomainRow {
        state: DomainState::Verified,
        checked_at_ms: Some(9),
        proven_at_ms: Some(9),
        ..old
    };
    assert!(!ledger.judge_domain(&verdict).await.unwrap());
    assert_eq!(ledger.domains(None, 9).await.unwrap(), std::slice::from_ref(&new));
    let verdict = DomainRow { secret: new.secret.clone(), preview: new.preview.clone(), ..verdict };
    assert!(ledger.judge_domain(&verdict).await.unwrap());
    assert_eq!(ledger.domains(None, 9).await.unwrap(), [verdict]);
}
