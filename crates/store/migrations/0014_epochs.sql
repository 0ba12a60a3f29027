-- All sandboxes of a node have its epoch: who starts need not write it to each of them.
ALTER TABLE sandboxes DROP COLUMN epoch;
