"""The monitor: one process per home that samples the node, and tells MLflow what runs do."""
