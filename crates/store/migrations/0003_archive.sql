-- Sandboxes that are gone, for people. An image or a save of one may be gone too: nothing is referred to.
CREATE TABLE archive (
    id            TEXT PRIMARY KEY,
    spec          TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    ended_at_ms   INTEGER NOT NULL,
    -- Why, if nobody asked for it.
    reason        TEXT
) STRICT;

CREATE INDEX archive_by_end ON archive (ended_at_ms, id);

-- How many sandboxes may be claimed from it at the same time.
ALTER TABLE pools ADD COLUMN max INTEGER;
-- 0: a pool that is older than these columns.
ALTER TABLE pools ADD COLUMN created_at_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pools ADD COLUMN updated_at_ms INTEGER NOT NULL DEFAULT 0;

CREATE TABLE secrets (
    name          TEXT PRIMARY KEY,
    version       INTEGER NOT NULL,
    -- The value of this version, encrypted with a key that is not in the ledger.
    nonce         BLOB NOT NULL,
    sealed        BLOB NOT NULL,
    created_at_ms INTEGER NOT NULL,
    updated_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE builds (
    id            TEXT PRIMARY KEY,
    -- What the one who asked for it called it, to get the same build for the same question.
    idempotency   TEXT UNIQUE,
    build         TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX builds_by_time ON builds (created_at_ms, id);
