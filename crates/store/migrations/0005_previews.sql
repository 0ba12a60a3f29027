-- Addresses of ports inside sandboxes. They go in the instant in which their sandbox goes, and take
-- their tokens with them.
CREATE TABLE previews (
    id            TEXT PRIMARY KEY,
    sandbox_id    TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    name          TEXT NOT NULL,
    -- The first part of its host names.
    label         TEXT NOT NULL UNIQUE,
    preview       TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    UNIQUE (sandbox_id, name)
) STRICT;

CREATE TABLE preview_tokens (
    id            TEXT PRIMARY KEY,
    preview_id    TEXT NOT NULL REFERENCES previews (id) ON DELETE CASCADE,
    -- SHA-256 of the token, which is 256 random bits and so needs no salt.
    hash          BLOB NOT NULL UNIQUE,
    expires_at_ms INTEGER,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX preview_tokens_by_preview ON preview_tokens (preview_id);
