-- Why a sandbox failed or ended was a sentence, and is a code: these are all the sentences that were written.
UPDATE archive SET reason = CASE reason
    WHEN 'it reached its maximum age' THEN 'max_age'
    WHEN 'it reached its date' THEN 'expired'
    WHEN 'nobody used it for its idle time' THEN 'idle'
    WHEN 'there was no room for it on this host within its time' THEN 'no_capacity'
    WHEN 'it was deleted while it waited for room' THEN 'cancelled'
END;

UPDATE sandboxes SET rest = json_set(rest, '$.reason', json(CASE
    WHEN rest ->> '$.reason' LIKE 'its entrypoint can''t be started: %' THEN json_object(
        'code', 'bad_entrypoint', 'cause', substr(rest ->> '$.reason', 34))
    WHEN rest ->> '$.reason' LIKE '%; files and memory are gone' THEN json_object(
        'code', 'machine_lost', 'cause', substr(rest ->> '$.reason', 1, length(rest ->> '$.reason') - 27))
    ELSE json_object('code', 'start_failed', 'cause', rest ->> '$.reason')
END)) WHERE rest ->> '$.rest' = 'failed';
