-- Times are milliseconds since 1970. JSON columns hold what their Rust types serialize to.

CREATE TABLE images (
    id            TEXT PRIMARY KEY,
    config        TEXT NOT NULL,
    -- The root file: its name under the image's directory, its length and its BLAKE3 hash.
    file          TEXT NOT NULL,
    file_bytes    INTEGER NOT NULL,
    file_hash     TEXT NOT NULL,
    -- BLAKE3 hash of the agent inside it.
    agent_hash    TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE image_names (
    name     TEXT PRIMARY KEY,
    image_id TEXT NOT NULL REFERENCES images (id)
) STRICT;

CREATE INDEX image_names_by_image ON image_names (image_id);

CREATE TABLE sandboxes (
    id              TEXT PRIMARY KEY,
    name            TEXT UNIQUE,
    -- Without ON DELETE: an image that a sandbox needs can't go.
    image_id        TEXT NOT NULL REFERENCES images (id),
    spec            TEXT NOT NULL,
    rest            TEXT NOT NULL,
    created_at_ms   INTEGER NOT NULL,
    last_used_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX sandboxes_by_image ON sandboxes (image_id);

CREATE TABLE api_keys (
    id              TEXT PRIMARY KEY,
    label           TEXT NOT NULL,
    -- The beginning of the key, for people to tell keys apart.
    prefix          TEXT NOT NULL,
    -- SHA-256 of the whole key, which is 256 random bits and so needs no salt.
    hash            BLOB NOT NULL UNIQUE,
    created_at_ms   INTEGER NOT NULL,
    last_used_at_ms INTEGER
) STRICT;
