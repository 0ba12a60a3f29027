-- Lists are read by pages in this order, and builds of engines without a look at each manifest.
CREATE INDEX images_by_time ON images (created_at_ms, id);
CREATE INDEX saves_by_engine ON saves (
    kind, json_extract(manifest, '$.engine'), json_extract(manifest, '$.engine_version'), id)
    WHERE json_valid(manifest);
