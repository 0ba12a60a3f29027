//! Rows of domains.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::Aggregate;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::DomainName;

use super::super::{DomainLedger, DomainRow};
use super::{SqliteLedger, column, parsed, time, to_column};

#[async_trait]
impl DomainLedger for SqliteLedger {
    async fn add_domain(&self, row: &DomainRow) -> Result<bool, StoreError> {
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
        let done =
            self.change(Aggregate::Domains, query).await.map_err(self.failed("record a domain"))?;
        Ok(done.rows_affected() > 0)
    }

    async fn judge_domain(&self, row: &DomainRow) -> Result<bool, StoreError> {
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
        let done =
            self.change(Aggregate::Domains, query).await.map_err(self.failed("record a domain"))?;
        Ok(done.rows_affected() > 0)
    }

    async fn domains(
        &self,
        after: Option<&DomainName>,
        limit: usize,
    ) -> Result<Vec<DomainRow>, StoreError> {
        let sql = "SELECT * FROM domains WHERE name > ? ORDER BY name LIMIT ?";
        let after = after.map(|after| after.as_str());
        self.page("list the domains", sql, after, limit, read_domain).await
    }

    async fn drop_domain(&self, name: &DomainName) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM domains WHERE name = ?").bind(name.as_str());
        let done =
            self.change(Aggregate::Domains, query).await.map_err(self.failed("remove a domain"))?;
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
