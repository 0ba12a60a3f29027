-- The node that has a volume's files, and alone mounts them. Empty: nobody yet, so the next node that starts.
ALTER TABLE volumes ADD COLUMN home TEXT NOT NULL DEFAULT '';
