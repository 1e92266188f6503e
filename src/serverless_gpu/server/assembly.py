"""How the server is put together: its parts in the order in which they need each other, taken apart the other way.

    settings ─▶ database (migrated) ─▶ keys, first start ─▶ hub, logs, blobs … ─▶ Services ─▶ loops
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model import access
from serverless_gpu.server.api.routing import Need
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.database import Database
from serverless_gpu.server.gate import Authenticate, Reach
from serverless_gpu.server.hub import Hub
from serverless_gpu.server.services import Services
from serverless_gpu.server.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembly:
    """A server that could be asked."""

    services: Services
    authenticate: Authenticate
    reach: Reach
