//! Rows of schedules and of their firings.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::schedule::{CreateSchedule, Firing, FiringState, SCHEDULES_MAX, Schedule};
use torpor_protocol::{FiringId, Name, ScheduleId, ScheduleRef, SnapshotId};

use super::super::{Fire, NextTime, ScheduleLedger};
use super::{LAST, SqliteLedger, column, json, limit_of, parsed, time, to_column};

/// Firings of one schedule that are remembered, besides those that are running.
const KEPT: u32 = 200;
/// Schedules with their last firing.
const SELECT: &str = "SELECT s.*, f.id AS firing_id, f.fire_at_ms, f.manual, f.state, f.outcome, f.started_at_ms, \
     f.ended_at_ms FROM schedules AS s LEFT JOIN firings AS f ON f.id = (SELECT id FROM firings \
     WHERE schedule_id = s.id ORDER BY started_at_ms DESC, fire_at_ms DESC LIMIT 1)";

#[async_trait]
impl ScheduleLedger for SqliteLedger {
    async fn create_schedule(
        &self,
        schedule: &Schedule,
        next: Option<NextTime>,
    ) -> Result<(), StoreError> {
        let action = "record a schedule in the ledger";
        let spec = serde_json::to_string(&schedule.spec).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "INSERT INTO schedules (id, name, spec, paused, next_at_ms, due_at_ms, created_at_ms)
             SELECT ?, ?, ?, ?, ?, ?, ? WHERE (SELECT count(*) FROM schedules) < ?",
        )
        .bind(schedule.id.as_str())
        .bind(schedule.spec.name.as_str())
        .bind(spec)
        .bind(schedule.spec.paused)
        .bind(next.map(|next| to_column(next.at_ms)))
        .bind(next.map(|next| to_column(next.due_ms)))
        .bind(to_column(schedule.created_at_ms))
        .bind(limit_of(SCHEDULES_MAX));
        match query.execute(&self.writer).await {
            Ok(done) if done.rows_affected() == 0 => {
                Err(StoreError::Invalid(format!("there are {SCHEDULES_MAX} schedules already")))
            }
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                Err(StoreError::NameTaken(schedule.spec.name.clone()))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    async fn find_schedule(&self, of: &ScheduleRef) -> Result<Option<Schedule>, StoreError> {
        let (by, key) = match of {
            ScheduleRef::Id(id) => ("id", id.as_str()),
            ScheduleRef::Name(name) => ("name", name.as_str()),
        };
        let sql = format!("{SELECT} WHERE s.{by} = ?");
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(key);
        self.one("look up a schedule", query, read_schedule).await
    }

    async fn schedules(
        &self,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<Schedule>, StoreError> {
        let sql = format!("{SELECT} WHERE s.name > ? ORDER BY s.name LIMIT ?");
        let after = after.map_or("", |after| after.as_str());
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(after).bind(limit_of(limit));
        self.all("list the schedules", query, read_schedule).await
    }

    async fn erase_schedule(&self, id: &ScheduleId) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM schedules WHERE id = ?").bind(id.as_str());
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("remove a schedule from the ledger"))?.rows_affected() > 0)
    }

    async fn pause_schedule(
        &self,
        id: &ScheduleId,
        paused: bool,
        next: Option<NextTime>,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE schedules SET paused = ?2, next_at_ms = ?3, due_at_ms = ?4 WHERE id = ?1",
        )
        .bind(id.as_str())
        .bind(paused)
        .bind(next.map(|next| to_column(next.at_ms)))
        .bind(next.map(|next| to_column(next.due_ms)));
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("pause or resume a schedule"))?.rows_affected() > 0)
    }

    async fn due_schedules(&self, now_ms: u64, limit: usize) -> Result<Vec<Schedule>, StoreError> {
        let sql = format!(
            "{SELECT} WHERE s.paused = 0 AND s.due_at_ms IS NOT NULL AND s.due_at_ms <= ?
             ORDER BY s.due_at_ms LIMIT ?"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql));
        let query = query.bind(to_column(now_ms)).bind(limit_of(limit));
        self.all("look for schedules that are due", query, read_schedule).await
    }

    async fn distant_schedules(
        &self,
        later_than_ms: u64,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<Schedule>, StoreError> {
        let sql = format!(
            "{SELECT} WHERE s.paused = 0 AND s.next_at_ms > ? AND s.name > ? ORDER BY s.name LIMIT ?"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(to_column(later_than_ms))
            .bind(after.map_or("", |after| after.as_str()))
            .bind(limit_of(limit));
        self.all("look for schedules that are far off", query, read_schedule).await
    }

    async fn bring_forward(
        &self,
        id: &ScheduleId,
        expected_at_ms: u64,
        next: NextTime,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE schedules SET next_at_ms = ?3, due_at_ms = ?4
             WHERE id = ?1 AND next_at_ms = ?2 AND paused = 0",
        )
        .bind(id.as_str())
        .bind(to_column(expected_at_ms))
        .bind(to_column(next.at_ms))
        .bind(to_column(next.due_ms));
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("bring a schedule forward"))
    }

    async fn next_firing(&self) -> Result<Option<u64>, StoreError> {
        let query = sqlx::query(
            "SELECT min(due_at_ms) AS due FROM schedules WHERE paused = 0 AND due_at_ms IS NOT NULL",
        );
        let read = |row: &SqliteRow| column::<Option<i64>>(row, "due");
        let due = self.one("look for the next schedule that is due", query, read).await?.flatten();
        Ok(due.map(|due| u64::try_from(due).unwrap_or(0)))
    }

    async fn fire(&self, fire: &Fire<'_>) -> Result<Option<Vec<Firing>>, StoreError> {
        let action = "record what a schedule does";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let take = sqlx::query(
            "UPDATE schedules SET next_at_ms = ?3, due_at_ms = ?4
             WHERE id = ?1 AND next_at_ms = ?2 AND paused = 0",
        )
        .bind(fire.schedule.as_str())
        .bind(to_column(fire.expected_at_ms))
        .bind(fire.next.map(|next| to_column(next.at_ms)))
        .bind(fire.next.map(|next| to_column(next.due_ms)));
        let taken = take.execute(&mut *transaction).await.map_err(self.failed(action))?;
        if taken.rows_affected() == 0 {
            return Ok(None);
        }
        let mut recorded = Vec::new();
        for firing in fire.firings {
            let firing = self.put_firing(&mut transaction, fire.schedule, firing, fire.together);
            recorded.extend(firing.await?);
        }
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(Some(recorded))
    }

    async fn record_firing(
        &self,
        schedule: &ScheduleId,
        firing: &Firing,
        together: bool,
    ) -> Result<Firing, StoreError> {
        let action = "record what a schedule does";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let recorded = self.put_firing(&mut transaction, schedule, firing, together).await?;
        transaction.commit().await.map_err(self.failed(action))?;
        recorded
            .ok_or_else(|| StoreError::Invalid("it is being done at this very moment".to_owned()))
    }

    async fn update_firing(&self, firing: &Firing) -> Result<bool, StoreError> {
        let action = "record how a firing stands";
        let outcome = serde_json::to_string(&firing.outcome).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "UPDATE firings SET state = ?3, outcome = ?4, ended_at_ms = ?5
             WHERE id = ?1 AND node = ?2 AND state = 'running'",
        )
        .bind(firing.id.as_str())
        .bind(self.node.as_str())
        .bind(firing.state.as_str())
        .bind(outcome)
        .bind(firing.ended_at_ms.map(to_column));
        let done = query.execute(&self.writer).await.map_err(self.failed(action))?;
        Ok(done.rows_affected() > 0)
    }

    async fn firings(
        &self,
        schedule: &ScheduleId,
        before: Option<&Place<FiringId>>,
        limit: usize,
    ) -> Result<Vec<Firing>, StoreError> {
        let before = before.map_or(LAST, |(at, id)| (to_column(*at), id.as_str()));
        let query = sqlx::query(
            "SELECT *, id AS firing_id FROM firings
             WHERE schedule_id = ? AND (started_at_ms, id) < (?, ?)
             ORDER BY started_at_ms DESC, id DESC LIMIT ?",
        )
        .bind(schedule.as_str())
        .bind(before.0)
        .bind(before.1)
        .bind(limit_of(limit));
        self.all("list the firings of a schedule", query, read_firing).await
    }

    async fn firings_under_way(&self) -> Result<Vec<(Schedule, Firing)>, StoreError> {
        let query = sqlx::query(
            "SELECT s.*, f.id AS firing_id, f.fire_at_ms, f.manual, f.state, f.outcome, f.started_at_ms,
                 f.ended_at_ms
             FROM firings AS f JOIN schedules AS s ON s.id = f.schedule_id
             WHERE f.state = 'running' AND f.node = ? ORDER BY f.started_at_ms",
        )
        .bind(self.node.as_str());
        let read = |row: &SqliteRow| Ok((read_schedule(row)?, read_firing(row)?));
        self.all("look for firings under way", query, read).await
    }

    async fn count_under_way(&self, schedule: &ScheduleId) -> Result<usize, StoreError> {
        let query = sqlx::query(
            "SELECT count(*) AS count FROM firings WHERE schedule_id = ? AND state = 'running'",
        )
        .bind(schedule.as_str());
        let count = self.one("count firings under way", query, |row| time(row, "count")).await?;
        Ok(count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0))
    }

    async fn note_snapshot(
        &self,
        schedule: &ScheduleId,
        snapshot: &SnapshotId,
        taken_at_ms: u64,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO schedule_snapshots (schedule_id, snapshot_id, taken_at_ms)
             SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM schedules WHERE id = ?1)
             ON CONFLICT DO NOTHING",
        )
        .bind(schedule.as_str())
        .bind(snapshot.as_str())
        .bind(to_column(taken_at_ms));
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("record a snapshot of a schedule"))
    }

    async fn snapshots_beyond(
        &self,
        schedule: &ScheduleId,
        keep: u32,
    ) -> Result<Vec<SnapshotId>, StoreError> {
        let action = "look for old snapshots of a schedule";
        // Those that somebody else removed do not count.
        let gone = sqlx::query(
            "DELETE FROM schedule_snapshots
             WHERE schedule_id = ? AND snapshot_id NOT IN (SELECT id FROM snapshots)",
        )
        .bind(schedule.as_str());
        gone.execute(&self.writer).await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "SELECT snapshot_id FROM schedule_snapshots WHERE schedule_id = ?
             ORDER BY taken_at_ms DESC, snapshot_id DESC LIMIT -1 OFFSET ?",
        )
        .bind(schedule.as_str())
        .bind(keep);
        let mut found = self.all(action, query, |row| parsed(row, "snapshot_id")).await?;
        found.reverse();
        Ok(found)
    }

    async fn forget_scheduled_snapshot(
        &self,
        schedule: &ScheduleId,
        snapshot: &SnapshotId,
    ) -> Result<(), StoreError> {
        let query =
            sqlx::query("DELETE FROM schedule_snapshots WHERE schedule_id = ? AND snapshot_id = ?")
                .bind(schedule.as_str())
                .bind(snapshot.as_str());
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("forget a snapshot of a schedule"))
    }
}

impl SqliteLedger {
    /// None if this time has fired already.
    async fn put_firing(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
        schedule: &ScheduleId,
        firing: &Firing,
        together: bool,
    ) -> Result<Option<Firing>, StoreError> {
        let action = "record what a schedule does";
        let outcome = serde_json::to_string(&firing.outcome).map_err(StoreError::failed(action))?;
        let query = sqlx::query(
            "INSERT INTO firings
                 (id, schedule_id, fire_at_ms, manual, state, node, outcome, started_at_ms, ended_at_ms)
             SELECT ?1, ?2, ?3, ?4, CASE WHEN skipped THEN 'skipped' ELSE ?5 END, ?6, ?7, ?8,
                 CASE WHEN skipped THEN ?8 ELSE ?9 END
             FROM (SELECT ?5 = 'running' AND NOT ?10 AND EXISTS (
                 SELECT 1 FROM firings WHERE schedule_id = ?2 AND state = 'running') AS skipped)
             WHERE TRUE ON CONFLICT (schedule_id, fire_at_ms, manual) DO NOTHING
             RETURNING *, id AS firing_id",
        )
        .bind(firing.id.as_str())
        .bind(schedule.as_str())
        .bind(to_column(firing.fire_at_ms))
        .bind(firing.manual)
        .bind(firing.state.as_str())
        .bind(self.node.as_str())
        .bind(outcome)
        .bind(to_column(firing.started_at_ms))
        .bind(firing.ended_at_ms.map(to_column))
        .bind(together);
        let row = query.fetch_optional(&mut **transaction).await.map_err(self.failed(action))?;
        let prune = sqlx::query(
            "DELETE FROM firings WHERE state <> 'running' AND id IN (
                 SELECT id FROM firings WHERE schedule_id = ?
                 ORDER BY started_at_ms DESC, id DESC LIMIT -1 OFFSET ?)",
        )
        .bind(schedule.as_str())
        .bind(KEPT);
        prune.execute(&mut **transaction).await.map_err(self.failed(action))?;
        row.as_ref().map(read_firing).transpose()
    }
}

fn read_schedule(row: &SqliteRow) -> Result<Schedule, StoreError> {
    let spec: CreateSchedule = json(row, "spec", "a schedule")?;
    let paused = column(row, "paused")?;
    let next: Option<i64> = column(row, "next_at_ms")?;
    let last: Option<String> = column(row, "firing_id")?;
    Ok(Schedule {
        id: parsed(row, "id")?,
        spec: CreateSchedule { paused, ..spec },
        next_at_ms: next.map(|next| u64::try_from(next).unwrap_or(0)),
        created_at_ms: time(row, "created_at_ms")?,
        last: last.map(|_| read_firing(row)).transpose()?,
    })
}

fn read_firing(row: &SqliteRow) -> Result<Firing, StoreError> {
    let ended: Option<i64> = column(row, "ended_at_ms")?;
    let state: FiringState = parsed(row, "state")?;
    Ok(Firing {
        id: parsed(row, "firing_id")?,
        fire_at_ms: time(row, "fire_at_ms")?,
        manual: column(row, "manual")?,
        state,
        started_at_ms: time(row, "started_at_ms")?,
        ended_at_ms: ended.map(|ended| u64::try_from(ended).unwrap_or(0)),
        outcome: json(row, "outcome", "a firing")?,
    })
}
