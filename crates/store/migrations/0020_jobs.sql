-- Jobs: specifications with a name.
CREATE TABLE jobs (
    name          TEXT PRIMARY KEY,
    spec          TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    updated_at_ms INTEGER NOT NULL
) STRICT;

-- Runs of jobs, each with a copy of its specification.
CREATE TABLE executions (
    id            TEXT PRIMARY KEY,
    job           TEXT,
    spec          TEXT NOT NULL,
    state         TEXT NOT NULL,
    -- Why it is cancelled.
    reason        TEXT,
    -- Tasks that may run at the same time.
    parallel      INTEGER NOT NULL,
    total         INTEGER NOT NULL,
    deadline_ms   INTEGER,
    created_at_ms INTEGER NOT NULL,
    ended_at_ms   INTEGER,
    -- Of tasks by state, when it is over; before, they are counted.
    counts        TEXT
) STRICT;

CREATE INDEX executions_by_time ON executions (created_at_ms, id);
CREATE INDEX executions_by_job ON executions (job, created_at_ms, id) WHERE job IS NOT NULL;
CREATE INDEX executions_open ON executions (created_at_ms, id) WHERE ended_at_ms IS NULL;
CREATE INDEX executions_over ON executions (ended_at_ms, id) WHERE ended_at_ms IS NOT NULL;

-- The queue, and what became of it.
CREATE TABLE tasks (
    execution          TEXT NOT NULL REFERENCES executions (id) ON DELETE CASCADE,
    idx                INTEGER NOT NULL,
    state              TEXT NOT NULL,
    input              TEXT,
    -- How often it was claimed: with the owner, what each write of one who works on it is held to.
    attempt            INTEGER NOT NULL DEFAULT 0,
    failures           INTEGER NOT NULL DEFAULT 0,
    interruptions      INTEGER NOT NULL DEFAULT 0,
    interrupted_by     TEXT,
    not_before_ms      INTEGER NOT NULL DEFAULT 0,
    -- Who works on it, or did last.
    node               TEXT,
    epoch              INTEGER,
    sandbox            TEXT,
    -- Its process, from when it was started.
    pid                INTEGER,
    process_started_ms INTEGER,
    -- When this attempt has taken too long.
    timeout_at_ms      INTEGER,
    started_at_ms      INTEGER,
    ended_at_ms        INTEGER,
    ran_ms             INTEGER,
    exit_report        TEXT,
    output             TEXT,
    reason             TEXT,
    message            TEXT,
    results_bytes      INTEGER,
    -- Its place among those of its execution that are over, as they became so.
    place              INTEGER,
    PRIMARY KEY (execution, idx)
) STRICT, WITHOUT ROWID;

-- Claiming: who is next in an execution, and how many run there.
CREATE INDEX tasks_by_state ON tasks (execution, state, not_before_ms, idx);
-- How many run on a node, and which.
CREATE INDEX tasks_running ON tasks (node, execution, idx) WHERE state = 'running';
CREATE INDEX tasks_over ON tasks (execution, place) WHERE place IS NOT NULL;
-- Whose logs are kept.
CREATE INDEX tasks_by_sandbox ON tasks (sandbox) WHERE sandbox IS NOT NULL;
