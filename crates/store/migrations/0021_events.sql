-- What happened, in order. Rows are written by the triggers below, in the transaction that makes it so, or beside
-- the rows that they are about: an event is there exactly if what it tells is.
CREATE TABLE events (
    -- Never used again, also of rows that are gone.
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id       TEXT NOT NULL,
    kind     TEXT NOT NULL,
    subject  TEXT NOT NULL,
    -- An object; `labels` in it are those that webhooks select by.
    data     TEXT NOT NULL,
    at_ms    INTEGER NOT NULL
) STRICT;

CREATE INDEX events_by_subject ON events (subject, sequence);

CREATE TABLE webhooks (
    id                TEXT PRIMARY KEY,
    url               TEXT NOT NULL,
    -- JSON lists and objects; empty: all.
    kinds             TEXT NOT NULL,
    labels            TEXT NOT NULL,
    enabled           INTEGER NOT NULL,
    disabled_reason   TEXT,
    -- The secret, encrypted with a key that is not in the ledger.
    nonce             BLOB NOT NULL,
    sealed            BLOB NOT NULL,
    -- The one before, which is good for a while.
    previous_nonce    BLOB,
    previous_sealed   BLOB,
    previous_until_ms INTEGER,
    last              TEXT,
    created_at_ms     INTEGER NOT NULL
) STRICT;

-- What is to be sent, and what was.
CREATE TABLE deliveries (
    id             TEXT PRIMARY KEY,
    -- None: sent once, to `url`, signed with the secret that is here.
    webhook_id     TEXT REFERENCES webhooks (id) ON DELETE CASCADE,
    event_id       TEXT NOT NULL,
    kind           TEXT NOT NULL,
    subject        TEXT NOT NULL,
    body           TEXT NOT NULL,
    url            TEXT,
    nonce          BLOB,
    sealed         BLOB,
    state          TEXT NOT NULL DEFAULT 'pending',
    attempts       INTEGER NOT NULL DEFAULT 0,
    -- Not before this. 0: at once.
    due_at_ms      INTEGER NOT NULL DEFAULT 0,
    -- Not after this; it is set by the first attempt.
    expires_at_ms  INTEGER,
    -- Who tries it now, and until when nobody else does.
    node           TEXT,
    lease_until_ms INTEGER NOT NULL DEFAULT 0,
    last           TEXT,
    created_at_ms  INTEGER NOT NULL
) STRICT;

CREATE INDEX deliveries_due ON deliveries (webhook_id, due_at_ms) WHERE state = 'pending';
CREATE INDEX deliveries_by_webhook ON deliveries (webhook_id, created_at_ms, id);

-- The outbox: a delivery is there exactly if its event was.
CREATE TRIGGER event_told AFTER INSERT ON events
BEGIN
    INSERT INTO deliveries (id, webhook_id, event_id, kind, subject, body, created_at_ms)
    SELECT 'delivery-' || substr(lower(hex(randomblob(11))), 1, 21), w.id, NEW.id, NEW.kind, NEW.subject,
        json_object('id', NEW.id, 'sequence', NEW.sequence, 'type', NEW.kind,
            'timestamp', strftime('%Y-%m-%dT%H:%M:%fZ', NEW.at_ms / 1000.0, 'unixepoch'),
            'subject', NEW.subject, 'data', json(NEW.data)),
        NEW.at_ms
    FROM webhooks AS w
    WHERE w.enabled = 1
        AND (w.kinds = '[]' OR EXISTS (SELECT 1 FROM json_each(w.kinds) WHERE value = NEW.kind))
        AND NOT EXISTS (SELECT 1 FROM json_each(w.labels) AS wanted WHERE NOT EXISTS (
            SELECT 1 FROM json_each(NEW.data, '$.labels') AS has
            WHERE has.key = wanted.key AND has.value = wanted.value));
    -- As many as are remembered.
    DELETE FROM events WHERE sequence <= NEW.sequence - 100000;
END;

-- Sandboxes that images are built in are nobody's, and tell nothing.
CREATE TRIGGER sandbox_created AFTER INSERT ON sandboxes
WHEN NEW.spec -> '$.labels."torpor.build"' IS NULL
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'sandbox.created', NEW.id,
        json_patch('{}', json_object('name', NEW.name, 'image', NEW.spec ->> 'image',
            'labels', json(coalesce(NEW.spec -> 'labels', '{}')))),
        NEW.created_at_ms);
END;

CREATE TRIGGER sandbox_slept AFTER UPDATE OF rest ON sandboxes
WHEN NEW.rest IS NOT OLD.rest AND NEW.rest ->> 'rest' = 'standby' AND OLD.rest ->> 'rest' <> 'standby'
    AND NEW.spec -> '$.labels."torpor.build"' IS NULL
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'sandbox.slept', NEW.id,
        json_patch('{}', json_object('name', NEW.name,
            'labels', json(coalesce(NEW.spec -> 'labels', '{}')),
            -- It lost its machine, and is as it was then.
            'recovered_from', CASE WHEN NEW.facts ->> 'recovered_from_ms' IS NOT OLD.facts ->> 'recovered_from_ms'
                THEN strftime('%Y-%m-%dT%H:%M:%fZ', (NEW.facts ->> 'recovered_from_ms') / 1000.0, 'unixepoch') END)),
        CAST(unixepoch('subsec') * 1000 AS INTEGER));
END;

CREATE TRIGGER sandbox_woke AFTER UPDATE OF rest ON sandboxes
WHEN NEW.rest IS NOT OLD.rest AND NEW.rest ->> 'rest' = 'running'
    AND (OLD.rest ->> 'rest' = 'standby' OR NEW.facts ->> 'wakes' > OLD.facts ->> 'wakes')
    AND NEW.spec -> '$.labels."torpor.build"' IS NULL
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'sandbox.woke', NEW.id,
        json_patch('{}', json_object('name', NEW.name,
            'labels', json(coalesce(NEW.spec -> 'labels', '{}')))),
        CAST(unixepoch('subsec') * 1000 AS INTEGER));
END;

CREATE TRIGGER sandbox_failed AFTER UPDATE OF rest ON sandboxes
WHEN NEW.rest IS NOT OLD.rest AND NEW.rest ->> 'rest' = 'failed' AND OLD.rest ->> 'rest' <> 'failed'
    AND NEW.spec -> '$.labels."torpor.build"' IS NULL
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'sandbox.failed', NEW.id,
        json_patch('{}', json_object('name', NEW.name,
            'labels', json(coalesce(NEW.spec -> 'labels', '{}')),
            'reason', NEW.rest ->> '$.reason.code', 'cause', substr(NEW.rest ->> '$.reason.cause', 1, 500))),
        CAST(unixepoch('subsec') * 1000 AS INTEGER));
END;

CREATE TRIGGER sandbox_ended AFTER INSERT ON archive
WHEN NEW.spec -> '$.labels."torpor.build"' IS NULL
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'sandbox.ended', NEW.id,
        json_patch('{}', json_object('name', NEW.spec ->> 'name', 'image', NEW.spec ->> 'image',
            'labels', json(coalesce(NEW.spec -> 'labels', '{}')), 'reason', NEW.reason)),
        NEW.ended_at_ms);
END;

CREATE TRIGGER snapshot_taken_at_once AFTER INSERT ON snapshots
WHEN NEW.snapshot ->> 'state' = 'completed'
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'snapshot.completed', NEW.id,
        json_patch('{}', json_object('name', NEW.name, 'kind', NEW.snapshot ->> 'kind',
            'sandbox', NEW.snapshot ->> 'sandbox', 'sandbox_name', NEW.snapshot ->> 'sandbox_name',
            'labels', json(coalesce(
                (SELECT spec -> 'labels' FROM sandboxes WHERE id = NEW.snapshot ->> 'sandbox'), '{}')))),
        CAST(unixepoch('subsec') * 1000 AS INTEGER));
END;

CREATE TRIGGER snapshot_completed AFTER UPDATE OF snapshot ON snapshots
WHEN NEW.snapshot ->> 'state' = 'completed' AND OLD.snapshot ->> 'state' <> 'completed'
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'snapshot.completed', NEW.id,
        json_patch('{}', json_object('name', NEW.name, 'kind', NEW.snapshot ->> 'kind',
            'sandbox', NEW.snapshot ->> 'sandbox', 'sandbox_name', NEW.snapshot ->> 'sandbox_name',
            'labels', json(coalesce(
                (SELECT spec -> 'labels' FROM sandboxes WHERE id = NEW.snapshot ->> 'sandbox'), '{}')))),
        CAST(unixepoch('subsec') * 1000 AS INTEGER));
END;

-- The end of an execution is an event.
CREATE TRIGGER execution_finished AFTER UPDATE OF state ON executions
WHEN NEW.state IN ('succeeded', 'failed', 'cancelled') AND OLD.state NOT IN ('succeeded', 'failed', 'cancelled')
BEGIN
    INSERT INTO events (id, kind, subject, data, at_ms)
    VALUES ('event-' || substr(lower(hex(randomblob(11))), 1, 21), 'job.finished', NEW.id,
        json_patch('{}', json_object('job', NEW.job, 'state', NEW.state, 'reason', NEW.reason, 'tasks', NEW.total,
            'counts', json(coalesce(NEW.counts, 'null')),
            'labels', json(coalesce(NEW.spec -> '$.sandbox.labels', '{}')))),
        coalesce(NEW.ended_at_ms, CAST(unixepoch('subsec') * 1000 AS INTEGER)));
END;
