-- Requests that their clients may repeat (Idempotency-Key), for a day.
CREATE TABLE requests (
    -- Of the caller and its key: a hash that nobody can make without the installation's secret key.
    id            TEXT PRIMARY KEY,
    -- Of what was asked.
    fingerprint   TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    -- The answer, encrypted; none while it is under way, and if nobody knows how it ended.
    nonce         BLOB,
    sealed        BLOB
) STRICT;

CREATE INDEX requests_by_time ON requests (created_at_ms);

-- Which sandbox a request made.
CREATE INDEX sandboxes_by_request ON sandboxes (json_extract(facts, '$.request'))
    WHERE json_extract(facts, '$.request') IS NOT NULL;
