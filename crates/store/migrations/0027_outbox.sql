-- Answers are beside what is listed, and what is remembered is counted in bytes: of the request until it is over,
-- then of the answer.
ALTER TABLE invocations ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE invocations ADD COLUMN settled_at_ms INTEGER;
ALTER TABLE invocations ADD COLUMN answer TEXT;

UPDATE invocations SET answer = invocation -> '$.answer',
    settled_at_ms = CASE WHEN state IN ('succeeded', 'failed') THEN created_at_ms END;
UPDATE invocations SET invocation = json_remove(invocation, '$.answer'),
    bytes = coalesce(length(CASE WHEN settled_at_ms IS NULL THEN request ELSE answer END), 0);

DROP INDEX invocations_due;
DROP INDEX invocations_running;
-- With the state, so that counting reads no rows.
CREATE INDEX invocations_queued ON invocations (service_id, not_before_ms, bytes, state) WHERE state = 'queued';
CREATE INDEX invocations_running ON invocations (service_id, bytes, state) WHERE state = 'running';
CREATE INDEX invocations_settled ON invocations (service_id, settled_at_ms, id, bytes)
    WHERE settled_at_ms IS NOT NULL;

-- Whose receiver it goes to, as far as that is known: a webhook, or the service whose callback it is. One that is
-- slow holds up no other.
ALTER TABLE deliveries ADD COLUMN service_id TEXT;
ALTER TABLE deliveries ADD COLUMN lane TEXT NOT NULL AS (coalesce(webhook_id, service_id, '')) VIRTUAL;
-- When somebody may try it: it is due, and nobody tries it now.
ALTER TABLE deliveries ADD COLUMN next_at_ms INTEGER NOT NULL AS (max(due_at_ms, lease_until_ms)) VIRTUAL;

DROP INDEX deliveries_due;
CREATE INDEX deliveries_next ON deliveries (lane, next_at_ms, created_at_ms) WHERE state = 'pending';
CREATE INDEX deliveries_tried ON deliveries (lane, lease_until_ms) WHERE state = 'pending' AND lease_until_ms > 0;
