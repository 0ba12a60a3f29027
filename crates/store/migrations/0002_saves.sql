-- Saved moments of machines. A save is kept while something below names it: none of the references
-- has ON DELETE, so what is needed can't go.

CREATE TABLE saves (
    id            TEXT PRIMARY KEY,
    kind          TEXT NOT NULL,
    image_id      TEXT NOT NULL REFERENCES images (id),
    -- The same as manifest.json in the save's directory.
    manifest      TEXT NOT NULL,
    bytes         INTEGER NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX saves_by_image ON saves (image_id);

CREATE TABLE snapshots (
    id            TEXT PRIMARY KEY,
    name          TEXT UNIQUE,
    -- None while it is in progress, and if it failed.
    save_id       TEXT REFERENCES saves (id),
    snapshot      TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX snapshots_by_save ON snapshots (save_id);

CREATE TABLE pools (
    name        TEXT PRIMARY KEY,
    save_id     TEXT REFERENCES saves (id),
    -- Where the save came from, for people: the snapshot itself may be gone.
    snapshot_id TEXT,
    image_id    TEXT NOT NULL REFERENCES images (id),
    size        INTEGER NOT NULL,
    spec        TEXT NOT NULL
) STRICT;

CREATE INDEX pools_by_save ON pools (save_id);
CREATE INDEX pools_by_image ON pools (image_id);

ALTER TABLE sandboxes ADD COLUMN save_id TEXT REFERENCES saves (id);
ALTER TABLE sandboxes ADD COLUMN facts TEXT NOT NULL DEFAULT '{}';

CREATE INDEX sandboxes_by_save ON sandboxes (save_id);
