-- The hosts of an installation. `epoch` grows with each start of a node's daemon.
CREATE TABLE nodes (
    id    TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL
) STRICT;

-- Who may write a sandbox: its node, since this start. Empty: nobody yet, so the next node that starts.
ALTER TABLE sandboxes ADD COLUMN node TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;

CREATE INDEX sandboxes_by_node ON sandboxes (node, id);

-- What is found or listed by these must not cost a look at every row.
CREATE INDEX snapshots_by_time ON snapshots (created_at_ms, id);
CREATE INDEX snapshots_by_sandbox ON snapshots (json_extract(snapshot, '$.sandbox'));
CREATE INDEX snapshots_by_sandbox_name ON snapshots (json_extract(snapshot, '$.sandbox_name'));
CREATE INDEX archive_by_name ON archive (json_extract(spec, '$.name'), ended_at_ms, id);
CREATE INDEX api_keys_by_time ON api_keys (created_at_ms, id);
CREATE INDEX previews_by_time ON previews (created_at_ms, id);

-- The node that works on it: when its daemon starts anew, the work is lost.
ALTER TABLE builds ADD COLUMN node TEXT NOT NULL DEFAULT '';

-- How often each node changed what others may have in memory.
CREATE TABLE changes (
    aggregate TEXT NOT NULL,
    node      TEXT NOT NULL,
    version   INTEGER NOT NULL,
    PRIMARY KEY (aggregate, node)
) STRICT;
