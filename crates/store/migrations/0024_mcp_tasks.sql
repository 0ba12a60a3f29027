-- Long runs that MCP clients ask about later. What runs is a process of a sandbox; the row says whose it is, and
-- how it ended once that was seen.

CREATE TABLE mcp_tasks (
    id            TEXT PRIMARY KEY,
    -- Who asked for it (a hash of the API key; empty: no key was needed). Nobody else sees it.
    caller        TEXT NOT NULL,
    sandbox_id    TEXT NOT NULL,
    pid           INTEGER NOT NULL,
    -- Of the process: tells it from another that had the same pid.
    started_at_ms INTEGER NOT NULL,
    -- Of the answer, in bytes.
    output_max    INTEGER NOT NULL,
    state         TEXT NOT NULL CHECK (state IN ('working', 'completed', 'failed', 'cancelled')),
    -- JSON: the result, or why it failed.
    outcome       TEXT,
    created_at_ms INTEGER NOT NULL,
    updated_at_ms INTEGER NOT NULL,
    expires_at_ms INTEGER NOT NULL
) STRICT;

CREATE INDEX mcp_tasks_by_caller ON mcp_tasks (caller, state, created_at_ms);
CREATE INDEX mcp_tasks_by_end ON mcp_tasks (expires_at_ms);
