"""What the server works with, in one object: routes, loops and verbs get it and look for nothing anywhere else.

    database      transactions            hub     who waits for what; closed once the server is to stop
    blobs         parts of payloads       logs    output of ranks, in files
    environments  what was captured       spool   large bodies until they are whole
    engine        where gangs can be      …

`assembly.py` makes it for the server; tests make one with what they need. Its parts do not know it. Whoever adds a part
adds a field here and a line there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from sqlalchemy.engine import Connection

from serverless_gpu.ambient import Clock
from serverless_gpu.server.blobs import Blobs
from serverless_gpu.server.environments import Environments
from serverless_gpu.server.feasibility_memory import FeasibilityMemory
from serverless_gpu.server.gang_progress import GangProgress
from serverless_gpu.server.gathering import Meetings
from serverless_gpu.server.health import Health
from serverless_gpu.server.hub import Hub
from serverless_gpu.server.keys import Keys
from serverless_gpu.server.liveness import Deliveries, Leases, Looks, Presence
from serverless_gpu.server.logs import Logs
from serverless_gpu.server.measures import Measures
from serverless_gpu.server.receiving import Spool
from serverless_gpu.server.sealing import Sealer
from serverless_gpu.server.sentences import Sentences
from serverless_gpu.server.settings import Settings
from serverless_gpu.server.spending import Spending
from serverless_gpu.server.waiting_room import WaitingRoom
from serverless_gpu.wire.pool_join import RayPool

T = TypeVar("T")


class Transactions(Protocol):
    """The database, as far as most need to know it: `server.database.Database`."""

    def read(self, work: Callable[[Connection], T]) -> T:
        """Return what `work` returns, reading one state of the database; called in a thread."""
        ...

    def write(self, work: Callable[[Connection], T]) -> T:
        """Return what `work` returns once its changes are durable; called in a thread. `work` may run twice."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services:
    """What routes, loops and verbs work with.

    `logs`, `blobs`, `environments` and `spool` come together from `storage.open_storage`.

    Attributes:
        settings: what the server was told.
        keys: for tokens of attempts.
        sealer: seals and opens callers' variables.
        leases: when attempts were heard of last; whoever applies a report renews.
        looks: who is to report now.
        meetings: what crews have said that are to meet.
        gang_progress: how gangs on several nodes get on.
        presence: when nodes were heard of last.
        deliveries: orders that left.
        sentences: what runs that wait are told.
        waiting_room: how many more runs each principal may have waiting.
        measures: what is counted, for Prometheus.
        health: whether the server can do its work.
        spending: how every budget stands.
        feasible: which runs some node could serve.
        engine_nodes: returns the names of the nodes that the server's engine has, before their agents say hello.
        ray_pool: returns how other machines join, or None where none can.
        unwritable: returns why the database takes no writes now, in words that name no one, or "".
        low: returns why the database takes no new runs, in words that name no one, or "".
    """

    settings: Settings
    clock: Clock
    database: Transactions
    hub: Hub
    keys: Keys
    sealer: Sealer
    logs: Logs
    blobs: Blobs
    environments: Environments
    spool: Spool
    leases: Leases = dataclasses.field(default_factory=Leases)
    looks: Looks = dataclasses.field(default_factory=Looks)
    meetings: Meetings = dataclasses.field(default_factory=Meetings)
    gang_progress: GangProgress = dataclasses.field(default_factory=GangProgress)
    presence: Presence = dataclasses.field(default_factory=Presence)
    deliveries: Deliveries = dataclasses.field(default_factory=Deliveries)
    sentences: Sentences = dataclasses.field(default_factory=Sentences)
    waiting_room: WaitingRoom = dataclasses.field(default_factory=WaitingRoom)
    measures: Measures = dataclasses.field(default_factory=Measures)
    health: Health = dataclasses.field(default_factory=Health)
    spending: Spending = dataclasses.field(default_factory=Spending)
    feasible: FeasibilityMemory = dataclasses.field(default_factory=FeasibilityMemory)
    engine_nodes: Callable[[], Collection[str]] = tuple
    ray_pool: Callable[[], RayPool | None] = lambda: None
    low: Callable[[], str] = lambda: ""
    unwritable: Callable[[], str] = lambda: ""
