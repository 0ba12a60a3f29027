-- What saves consist of. A blob (blobs/HASH) stays while a row here has its hash.

CREATE TABLE save_files (
    save_id TEXT NOT NULL REFERENCES saves (id) ON DELETE CASCADE,
    name    TEXT NOT NULL,
    hash    TEXT NOT NULL,
    -- On disk, without holes.
    bytes   INTEGER NOT NULL,
    PRIMARY KEY (save_id, name)
) STRICT;

CREATE INDEX save_files_by_hash ON save_files (hash);

-- Of saves that are there, only all their files together are known to take so many bytes.
INSERT INTO save_files (save_id, name, hash, bytes)
SELECT save_id, name, hash,
       CAST(bytes * (1.0 * stored / max(sum(bytes) OVER (PARTITION BY save_id), 1)) AS INTEGER)
FROM (
    SELECT saves.id AS save_id, saves.bytes AS stored,
           json_extract(file.value, '$.name') AS name,
           json_extract(file.value, '$.hash') AS hash,
           json_extract(file.value, '$.bytes') AS bytes
    FROM saves, json_each(saves.manifest, '$.files') AS file
    WHERE json_valid(saves.manifest)
)
WHERE typeof(name) = 'text' AND typeof(hash) = 'text' AND typeof(bytes) = 'integer';

-- Who keeps a save, and by which id or name.
CREATE VIEW save_pins AS
SELECT save_id, 'sandbox' AS kind, id AS owner FROM sandboxes WHERE save_id IS NOT NULL
UNION ALL
SELECT save_id, 'snapshot', id FROM snapshots WHERE save_id IS NOT NULL
UNION ALL
SELECT save_id, 'pool', name FROM pools WHERE save_id IS NOT NULL;
