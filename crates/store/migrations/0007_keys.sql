-- A row: requests need a key, also when there is none any more. It comes with the first key, or not at all.
CREATE TABLE keys_required (id INTEGER PRIMARY KEY CHECK (id = 0)) STRICT;
INSERT INTO keys_required (id) SELECT 0 WHERE EXISTS (SELECT 1 FROM api_keys);
CREATE TRIGGER a_key_was_made AFTER INSERT ON api_keys
BEGIN
    INSERT OR IGNORE INTO keys_required (id) VALUES (0);
END;
