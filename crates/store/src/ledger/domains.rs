//! Rows of domains.

use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::domain::DomainState;
use torpor_protocol::{DomainName, PreviewId};

use super::{Ledger, column, parsed, time, to_column};

/// A host name that leads to a preview.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainRow {
    pub name: DomainName,
    pub preview: PreviewId,
    pub state: DomainState,
    /// What the record that proves it must say.
    pub secret: String,
    /// What the last look found, unless it was the proof.
    pub problem: Option<String>,
    pub checked_at_ms: Option<u64>,
    pub proven_at_ms: Option<u64>,
    pub created_at_ms: u64,
}

impl Ledger {
    /// Whether the name was free; if not, nothing changed.
    pub async fn add_domain(&self, row: &DomainRow) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "INSERT OR IGNORE INTO domains
                 (name, preview, state, secret, problem, checked_at_ms, proven_at_ms, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(row.name.as_str())
        .bind(row.preview.as_str())
        .bind(row.state.as_str())
        .bind(&row.secret)
        .bind(&row.problem)
        .bind(row.checked_at_ms.map(to_column))
        .bind(row.proven_at_ms.map(to_column))
        .bind(to_column(row.created_at_ms));
        let done = query.execute(&self.writer).await.map_err(self.failed("record a domain"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Records what a look at a domain found. One that is gone, or is another one of the same name
    /// by now, is left alone; says whether it was there.
    pub async fn judge_domain(&self, row: &DomainRow) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE domains SET state = ?, problem = ?, checked_at_ms = ?, proven_at_ms = ?
             WHERE name = ? AND secret = ?",
        )
        .bind(row.state.as_str())
        .bind(&row.problem)
        .bind(row.checked_at_ms.map(to_column))
        .bind(row.proven_at_ms.map(to_column))
        .bind(row.name.as_str())
        .bind(&row.secret);
        let done = query.execute(&self.writer).await.map_err(self.failed("record a domain"))?;
        Ok(done.rows_affected() > 0)
    }

    /// All domains, by name.
    pub async fn domains(&self) -> Result<Vec<DomainRow>, StoreError> {
        let query = sqlx::query("SELECT * FROM domains ORDER BY name");
        let rows = query.fetch_all(&self.readers).await;
        rows.map_err(self.failed("list the domains"))?.iter().map(read_domain).collect()
    }

    /// Whether there was one.
    pub async fn drop_domain(&self, name: &DomainName) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM domains WHERE name = ?").bind(name.as_str());
        let done = query.execute(&self.writer).await.map_err(self.failed("remove a domain"))?;
        Ok(done.rows_affected() > 0)
    }
}

fn read_domain(row: &SqliteRow) -> Result<DomainRow, StoreError> {
    let moment = |name| -> Result<Option<u64>, StoreError> {
        let ms: Option<i64> = column(row, name)?;
        Ok(ms.and_then(|ms| u64::try_from(ms).ok()))
    };
    Ok(DomainRow {
        name: parsed(row, "name")?,
        preview: parsed(row, "preview")?,
        state: parsed(row, "state")?,
        secret: column(row, "secret")?,
        problem: column(row, "problem")?,
        checked_at_ms: moment("checked_at_ms")?,
        proven_at_ms: moment("proven_at_ms")?,
        created_at_ms: time(row, "created_at_ms")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

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
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&Layout::open(dir.path()).unwrap()).await.unwrap();
        let first = row("a.example.org");
        assert!(ledger.add_domain(&first).await.unwrap());
        assert!(!ledger.add_domain(&row("a.example.org")).await.unwrap());
        assert_eq!(ledger.domains().await.unwrap(), std::slice::from_ref(&first));
        assert!(ledger.drop_domain(&first.name).await.unwrap());
        assert!(!ledger.drop_domain(&first.name).await.unwrap());
    }

    #[tokio::test]
    async fn a_verdict_about_a_domain_that_was_added_anew_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&Layout::open(dir.path()).unwrap()).await.unwrap();
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
        assert_eq!(ledger.domains().await.unwrap(), std::slice::from_ref(&new));
        let verdict =
            DomainRow { secret: new.secret.clone(), preview: new.preview.clone(), ..verdict };
        assert!(ledger.judge_domain(&verdict).await.unwrap());
        assert_eq!(ledger.domains().await.unwrap(), [verdict]);
    }
}
