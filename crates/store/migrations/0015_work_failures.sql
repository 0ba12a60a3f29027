-- Why a snapshot or a build failed was a sentence: it becomes the message, and a word is the reason.
UPDATE snapshots SET snapshot = json_set(snapshot,
    '$.message', snapshot ->> '$.reason',
    '$.reason', CASE
        WHEN snapshot ->> '$.reason' = 'the daemon ended while it was taken' THEN 'interrupted'
        WHEN snapshot ->> '$.reason' LIKE '%disk is full%' THEN 'no_capacity'
        ELSE 'failed' END)
WHERE snapshot ->> '$.reason' IS NOT NULL;

UPDATE builds SET build = json_set(build,
    '$.message', build ->> '$.reason',
    '$.reason', CASE
        WHEN build ->> '$.reason' = 'the daemon was restarted; build it again' THEN 'interrupted'
        WHEN build ->> '$.reason' LIKE 'its context did not arrive within %' THEN 'timed_out'
        ELSE 'failed' END)
WHERE build ->> '$.reason' IS NOT NULL;
