-- Services: programs with a stable address, hosted in sandboxes of their node.
CREATE TABLE services (
    id            TEXT PRIMARY KEY,
    name          TEXT NOT NULL UNIQUE,
    -- The node that has its instances.
    node          TEXT NOT NULL,
    service       TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX services_by_node ON services (node, id);

CREATE TABLE revisions (
    service_id TEXT NOT NULL REFERENCES services (id) ON DELETE CASCADE,
    number     INTEGER NOT NULL,
    -- Absent: it failed, and nothing begins from its image any more.
    image_id   TEXT REFERENCES images (id),
    revision   TEXT NOT NULL,
    PRIMARY KEY (service_id, number)
) STRICT;

CREATE INDEX revisions_by_image ON revisions (image_id);

-- Requests that are answered later. The request and its answer are kept for a while.
CREATE TABLE invocations (
    id            TEXT PRIMARY KEY,
    service_id    TEXT NOT NULL REFERENCES services (id) ON DELETE CASCADE,
    state         TEXT NOT NULL,
    -- Counts who works on it; an older one writes nothing.
    attempt       INTEGER NOT NULL,
    not_before_ms INTEGER NOT NULL,
    -- With its answer.
    invocation    TEXT NOT NULL,
    request       TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX invocations_due ON invocations (not_before_ms) WHERE state = 'queued';
CREATE INDEX invocations_by_service ON invocations (service_id, created_at_ms, id);

-- A preview leads to a sandbox or to a service, and goes with it.
CREATE TABLE previews_of_any (
    id            TEXT PRIMARY KEY,
    sandbox_id    TEXT REFERENCES sandboxes (id) ON DELETE CASCADE,
    service_id    TEXT REFERENCES services (id) ON DELETE CASCADE,
    name          TEXT NOT NULL,
    -- The first part of its host names.
    label         TEXT NOT NULL UNIQUE,
    preview       TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    UNIQUE (sandbox_id, name),
    UNIQUE (service_id, name),
    CHECK ((sandbox_id IS NULL) <> (service_id IS NULL))
) STRICT;

INSERT INTO previews_of_any (id, sandbox_id, name, label, preview, created_at_ms)
SELECT id, sandbox_id, name, label, preview, created_at_ms FROM previews;

CREATE TABLE tokens_of_any (
    id            TEXT PRIMARY KEY,
    preview_id    TEXT NOT NULL REFERENCES previews_of_any (id) ON DELETE CASCADE,
    -- SHA-256 of the token, which is 256 random bits and so needs no salt.
    hash          BLOB NOT NULL UNIQUE,
    expires_at_ms INTEGER,
    created_at_ms INTEGER NOT NULL
) STRICT;

INSERT INTO tokens_of_any SELECT id, preview_id, hash, expires_at_ms, created_at_ms FROM preview_tokens;

-- In this order: dropping a table takes with it what refers to its rows.
DROP TABLE preview_tokens;
DROP TABLE previews;
ALTER TABLE previews_of_any RENAME TO previews;
ALTER TABLE tokens_of_any RENAME TO preview_tokens;

CREATE INDEX preview_tokens_by_preview ON preview_tokens (preview_id);
CREATE INDEX previews_by_time ON previews (created_at_ms, id);

-- Instances that are gone, for the log of their service.
CREATE INDEX archive_by_service ON archive (json_extract(spec, '$.labels."torpor.service"'), ended_at_ms)
    WHERE json_extract(spec, '$.labels."torpor.service"') IS NOT NULL;
