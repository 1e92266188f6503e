"""A server's parts, made for a test: real ones on a directory and a database of its own, and no processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from serverless_gpu.ambient import Clock
from serverless_gpu.server.composition import ServerResources, Services, compose
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.core.server_key import Keys, Sealer
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.storage.server_stores import open_storage

KEY = b"k" * 32


def made_services(database: Transactions, home: Path, *, clock: Clock, **settings: Any) -> Services:
    """Return services on a database and a directory.

    Args:
        database: migrated.
        home: a home directory of the test's.
        clock: also for the storage.
        settings: fields of `Settings` that are not to be the default.
    """
    keys = Keys(KEY)
    told = Settings(home=home, database="", **settings)
    return compose(
        ServerResources(
            settings=told,
            clock=clock,
            database=database,
            hub=Hub(),
            keys=keys,
            sealer=Sealer(keys.sealing),
            **open_storage(told.directory, "", {}, clock=clock)._asdict(),
        )
    )


def recomposed(services: Services, **changes: Any) -> Services:
    """Return services on the same resources, with some of them replaced."""
    resources = {each.name: getattr(services, each.name) for each in dataclasses.fields(ServerResources)}
    return compose(ServerResources(**{**resources, **changes}))
