-- Where images of registries are from: what was pulled under which digest, and of which layers. A layer
-- (layers/HEX) stays while a row here has its digest.

CREATE TABLE image_origins (
    image_id TEXT PRIMARY KEY REFERENCES images (id) ON DELETE CASCADE,
    -- As the registry sent them.
    manifest BLOB NOT NULL,
    config   BLOB NOT NULL
) STRICT;

CREATE TABLE image_layers (
    image_id TEXT NOT NULL REFERENCES images (id) ON DELETE CASCADE,
    -- The lowest is 0.
    position INTEGER NOT NULL,
    digest   TEXT NOT NULL,
    -- As it is stored, compressed.
    bytes    INTEGER NOT NULL,
    PRIMARY KEY (image_id, position)
) STRICT;

CREATE INDEX image_layers_by_digest ON image_layers (digest);

CREATE TABLE image_digests (
    -- REPOSITORY@sha256:…
    reference TEXT PRIMARY KEY,
    image_id  TEXT NOT NULL REFERENCES images (id) ON DELETE CASCADE
) STRICT;

CREATE INDEX image_digests_by_image ON image_digests (image_id);

CREATE TABLE registry_logins (
    registry      TEXT PRIMARY KEY,
    username      TEXT NOT NULL,
    nonce         BLOB NOT NULL,
    sealed        BLOB NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;
