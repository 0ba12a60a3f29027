-- What was asked for, as a hash, if it may be asked for again: nobody else gets this execution under the same key.
ALTER TABLE executions ADD COLUMN asked TEXT;
-- Tasks of all executions of its job that may run at the same time; none: any number.
ALTER TABLE executions ADD COLUMN job_parallel INTEGER;
-- Before this nothing of it is begun: there was no room for its last one.
ALTER TABLE executions ADD COLUMN not_before_ms INTEGER NOT NULL DEFAULT 0;

-- How much the results of all tasks are, and whose they are.
CREATE INDEX tasks_results ON tasks (execution, results_bytes) WHERE results_bytes IS NOT NULL;

-- Sandboxes of tasks are remembered apart, so that they push no other out, and are forgotten with their execution.
CREATE INDEX archive_by_task ON archive (json_extract(spec, '$.labels."torpor.task"'))
    WHERE json_extract(spec, '$.labels."torpor.task"') IS NOT NULL;
CREATE INDEX archive_of_tasks ON archive (ended_at_ms, id)
    WHERE json_extract(spec, '$.labels."torpor.task"') IS NOT NULL;
CREATE INDEX archive_of_others ON archive (ended_at_ms, id)
    WHERE json_extract(spec, '$.labels."torpor.task"') IS NULL;
