-- What is done at times.
CREATE TABLE schedules (
    id            TEXT PRIMARY KEY,
    name          TEXT NOT NULL UNIQUE,
    -- As it was asked for; whether it is paused is beside it.
    spec          TEXT NOT NULL,
    paused        INTEGER NOT NULL,
    -- The next time, and when it is begun, which may be a little later. None: never again.
    next_at_ms    INTEGER,
    due_at_ms     INTEGER,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX schedules_due ON schedules (due_at_ms) WHERE paused = 0 AND due_at_ms IS NOT NULL;

-- Times that schedules fired, or should have. One row for each time: nothing fires twice.
CREATE TABLE firings (
    id            TEXT PRIMARY KEY,
    schedule_id   TEXT NOT NULL REFERENCES schedules (id) ON DELETE CASCADE,
    fire_at_ms    INTEGER NOT NULL,
    manual        INTEGER NOT NULL,
    state         TEXT NOT NULL,
    -- Who does it.
    node          TEXT NOT NULL,
    outcome       TEXT NOT NULL,
    started_at_ms INTEGER NOT NULL,
    ended_at_ms   INTEGER,
    UNIQUE (schedule_id, fire_at_ms, manual)
) STRICT;

CREATE INDEX firings_by_time ON firings (schedule_id, started_at_ms, id);
CREATE INDEX firings_under_way ON firings (schedule_id, node) WHERE state = 'running';

-- Snapshots that schedules took and that nobody removed since, as far as they know.
CREATE TABLE schedule_snapshots (
    schedule_id TEXT NOT NULL REFERENCES schedules (id) ON DELETE CASCADE,
    snapshot_id TEXT NOT NULL,
    taken_at_ms INTEGER NOT NULL,
    PRIMARY KEY (schedule_id, snapshot_id)
) STRICT;
