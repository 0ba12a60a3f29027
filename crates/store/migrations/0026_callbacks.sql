-- Who is told when an invocation is over: the delivery that it will be, where it goes, and the secret that signs it,
-- encrypted with a key that is not in the ledger.
ALTER TABLE invocations ADD COLUMN callback_id TEXT;
ALTER TABLE invocations ADD COLUMN callback_url TEXT;
ALTER TABLE invocations ADD COLUMN nonce BLOB;
ALTER TABLE invocations ADD COLUMN sealed BLOB;

CREATE INDEX invocations_running ON invocations (service_id) WHERE state = 'running';
