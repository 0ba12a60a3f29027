-- A row: requests need a key, also when there is none any more.
CREATE TABLE keys_required (id INTEGER PRIMARY KEY CHECK (id = 0)) STRICT;
INSERT INTO keys_required (id) SELECT 0 WHERE EXISTS (SELECT 1 FROM api_keys);
