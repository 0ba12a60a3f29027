-- JSON: the only hosts that the value may be sent to; empty: where the routes of a sandbox say.
ALTER TABLE secrets ADD COLUMN hosts TEXT NOT NULL DEFAULT '[]';
