-- Volumes and drives. Names of both are one space.
CREATE TABLE volumes (
    id            TEXT PRIMARY KEY,
    name          TEXT NOT NULL UNIQUE,
    kind          TEXT NOT NULL,
    size_mib      INTEGER NOT NULL,
    labels        TEXT NOT NULL,
    -- Who may mount a drive.
    permissions   TEXT NOT NULL,
    copy_of       TEXT,
    -- The sandbox that it was made for, as a copy, and goes with.
    made_for      TEXT,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX volumes_by_time ON volumes (created_at_ms, id);
CREATE INDEX volumes_by_made_for ON volumes (made_for) WHERE made_for IS NOT NULL;

-- Which sandbox has which. These rows are written by the triggers below alone: they are what the specifications
-- of the sandboxes say.
CREATE TABLE attachments (
    sandbox_id       TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    slot             INTEGER NOT NULL,
    -- Without ON DELETE: a volume that a sandbox has can't go.
    volume_id        TEXT NOT NULL REFERENCES volumes (id),
    path             TEXT NOT NULL,
    subpath          TEXT NOT NULL,
    read_only        INTEGER NOT NULL,
    exclusive_writer INTEGER NOT NULL,
    PRIMARY KEY (sandbox_id, slot)
) STRICT;

CREATE INDEX attachments_by_volume ON attachments (volume_id, sandbox_id);
-- One writer of a volume.
CREATE UNIQUE INDEX attachments_one_writer ON attachments (volume_id) WHERE exclusive_writer = 1;

CREATE TRIGGER attached_at_creation AFTER INSERT ON sandboxes
WHEN json_array_length(NEW.spec, '$.mounts') > 0
BEGIN
    INSERT INTO attachments
    SELECT NEW.id, m.value ->> 'slot', m.value ->> 'volume', m.value ->> 'path', m.value ->> 'subpath',
        m.value ->> 'read_only', m.value ->> 'kind' = 'volume' AND NOT m.value ->> 'read_only'
    FROM json_each(NEW.spec, '$.mounts') AS m WHERE m.type = 'object';
END;

CREATE TRIGGER attached_later AFTER UPDATE OF spec ON sandboxes
WHEN NEW.spec IS NOT OLD.spec AND NEW.spec -> 'mounts' IS NOT OLD.spec -> 'mounts'
BEGIN
    DELETE FROM attachments WHERE sandbox_id = NEW.id;
    INSERT INTO attachments
    SELECT NEW.id, m.value ->> 'slot', m.value ->> 'volume', m.value ->> 'path', m.value ->> 'subpath',
        m.value ->> 'read_only', m.value ->> 'kind' = 'volume' AND NOT m.value ->> 'read_only'
    FROM json_each(NEW.spec, '$.mounts') AS m WHERE m.type = 'object';
END;
