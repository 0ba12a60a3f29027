-- Steps of image builds that need not be done again: the key says all that went into a step, the save is
-- the filesystem after it. The last step of a build has the image instead.

CREATE TABLE build_cache (
    key           TEXT PRIMARY KEY,
    save_id       TEXT REFERENCES saves (id),
    image_id      TEXT REFERENCES images (id) ON DELETE CASCADE,
    -- As it was written, for people.
    step          TEXT NOT NULL,
    bytes         INTEGER NOT NULL,
    created_at_ms INTEGER NOT NULL,
    used_at_ms    INTEGER NOT NULL,
    CHECK ((save_id IS NULL) <> (image_id IS NULL))
) STRICT;

CREATE INDEX build_cache_by_save ON build_cache (save_id);
CREATE INDEX build_cache_by_image ON build_cache (image_id);
CREATE INDEX build_cache_by_use ON build_cache (used_at_ms);

DROP VIEW save_pins;
CREATE VIEW save_pins AS
SELECT save_id, 'sandbox' AS kind, id AS owner FROM sandboxes WHERE save_id IS NOT NULL
UNION ALL
SELECT save_id, 'snapshot', id FROM snapshots WHERE save_id IS NOT NULL
UNION ALL
SELECT save_id, 'pool', name FROM pools WHERE save_id IS NOT NULL
UNION ALL
SELECT save_id, 'build', key FROM build_cache WHERE save_id IS NOT NULL;
