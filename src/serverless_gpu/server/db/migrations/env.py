"""Configures Alembic to run revisions on the caller's connection and transaction."""

from __future__ import annotations

from alembic import context

from serverless_gpu.server.db.tables import metadata

# Alembic copies the table in batch mode, because SQLite cannot alter a column.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    compare_type=True,
)
context.run_migrations()
