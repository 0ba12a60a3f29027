-- Host names of their owners that lead to a preview. `secret` is what the record that proves one must say.
CREATE TABLE domains (
    name          TEXT    NOT NULL PRIMARY KEY,
    preview       TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    secret        TEXT    NOT NULL,
    problem       TEXT,
    checked_at_ms INTEGER,
    proven_at_ms  INTEGER,
    created_at_ms INTEGER NOT NULL
) STRICT;
