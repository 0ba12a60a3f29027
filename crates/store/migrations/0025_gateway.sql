-- Upstream servers of the MCP gateway, and what of them is approved.
CREATE TABLE mcp_servers (
    name          TEXT PRIMARY KEY,
    spec          TEXT NOT NULL,
    -- Items that clients see (JSON), and items that the server showed when it was last asked.
    approved      TEXT NOT NULL,
    seen          TEXT NOT NULL,
    -- Digests of items that were rejected.
    rejected      TEXT NOT NULL,
    listed_at_ms  INTEGER,
    -- Of the last change of what is approved.
    revision      INTEGER NOT NULL,
    created_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE mcp_clients (
    key      TEXT PRIMARY KEY,
    -- Absent: it was removed; its revisions go on from there, because calls name them.
    policy   TEXT,
    revision INTEGER NOT NULL
) STRICT;

-- Calls through the gateway, newest last; the oldest are forgotten.
CREATE TABLE mcp_calls (
    id    INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms INTEGER NOT NULL,
    call  TEXT NOT NULL
) STRICT;
