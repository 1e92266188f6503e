"""Returns views of the queue and of the fair shares, and serves their routes.

Every user sees the queue order and the owner, team and demand of each waiting run. Only callers who may see a run
receive its identifier, name and wait sentence. A wait sentence can name a run that is ahead in the queue or that
occupies the devices. A waiting user can therefore contact the owner of the named run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.scheduling.values import CLASSES, Reservation, TeamUse, WaitReason
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.pools import PoolService
from serverless_gpu.server.records import runs
from serverless_gpu.server.records.pools import StoredShare, every_share
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.scheduling.wait_reasons import WaitNotice, WaitReasons
from serverless_gpu.wire.queue import (
    LIMIT_MAX,
    QueueEntry,
    QueueView,
    ShareKind,
    ShareList,
    ShareRequest,
    ShareView,
    wait_view,
)

_NOT_IN_LINE = (WaitReason.ISOLATION.value, WaitReason.UNSATISFIABLE.value)


class QueueViews:
    """Lists the queue and the fair-share weights."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions, sentences: WaitReasons) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._sentences = sentences

    def view(self, who: Caller, reach: str, *, limit: int, mine: bool) -> QueueView:
        """Return the waiting runs in queue order. With `mine`, return only the caller's own runs."""
        order = () if mine else self._sentences.order(limit)
        owner = who.name if mine else None

        def work(connection: sa.Connection) -> tuple[list[str], dict[str, StoredRun], int]:
            # Append the runs that the scheduler has not read yet.
            ids = list(dict.fromkeys([*order, *runs.waiting(connection, limit=limit, owner=owner)]))[:limit]
            found = {run.id: run for run in runs.find_many(connection, ids)}
            return ids, found, sum(runs.queued_by_pool(connection).values())

        ids, found, waiting = self._database.read(work)
        now_ns = self._clock.wall_ns()
        # Omit promised start times in the past, because they no longer predict the start.
        reserved = {
            each.run_id: each for each in self._sentences.reservations() if each.at_ns is None or each.at_ns > now_ns
        }
        there = [found[run_id] for run_id in ids if run_id in found and found[run_id].state is State.QUEUED]
        entries = [
            _entry(
                run,
                reserved.get(run.id),
                self._sentences.glance(run.id) if run_views.in_reach(run, who=who, reach=reach) else None,
            )
            for run in there
        ]
        # Move to the end all runs that no node can execute now, because these runs delay no other run.
        entries.sort(key=lambda entry: entry.waiting is not None and entry.waiting.reason in _NOT_IN_LINE)
        return QueueView(entries=tuple(entries), waiting=waiting)

    def view_shares(self, who: Caller, reach: str) -> ShareList:
        """Return the fair shares that the caller may see, with their usage."""
        found = share_views(self._database.read(every_share), self._sentences.usage())
        mine = {("team", team) for team in who.teams} | {("user", who.name)}
        seen = [each for each in found if reach == AccessReach.ALL or (each.kind, each.name) in mine]
        return ShareList(shares=tuple(seen), half_life_s=self._settings.queue.half_life_s)


def share_views(there: Sequence[StoredShare], usage: Mapping[str, TeamUse]) -> list[ShareView]:
    """Return fair shares with their usage, the largest entitlement first.

    The keys of `usage` are team names, and "~name" for users without a team.
    """
    weights = {(share.kind, share.name): share.weight for share in there}
    used: dict[tuple[ShareKind, str], TeamUse] = {
        ("user" if name.startswith("~") else "team", name.removeprefix("~")): use for name, use in usage.items()
    }
    nothing = TeamUse(used_gpu_s=0.0, counted_gpu_s=0.0)
    among_all = {key for key in weights if key[0] == "team"} | set(used)
    total_weight = sum(weights.get(key, 1.0) for key in among_all)
    total_used = sum(use.used_gpu_s for use in used.values())
    found = [
        ShareView(
            kind=kind,
            name=name,
            weight=weights.get((kind, name), 1.0),
            due=weights.get((kind, name), 1.0) / total_weight,
            used_gpu_s=used.get((kind, name), nothing).used_gpu_s,
            counted_gpu_s=used.get((kind, name), nothing).counted_gpu_s,
            part=used.get((kind, name), nothing).used_gpu_s / total_used if total_used else 0.0,
        )
        for kind, name in sorted(among_all)
    ]
    found.sort(key=lambda each: -(each.due or 0.0))
    within = sorted(share.name for share in there if (share.kind, share.name) not in among_all)
    return found + [ShareView(kind="user", name=name, weight=weights["user", name]) for name in within]


def _entry(run: StoredRun, reserved: Reservation | None, told: WaitNotice | None) -> QueueEntry:
    """Return the queue entry of a waiting run. Pass None as `told` if the caller may not see the run."""
    resources = run.spec.resources
    entry = QueueEntry(
        run="",
        name="",
        owner=run.owner,
        team=run.team,
        priority=CLASSES[run.priority],
        place=0,
        gpus=resources.gpus,
        gpu_type=resources.gpu_type or "",
        pool=run.pool,
        since_ns=run.queued_ns,
        sentence="",
        reserved_ns=reserved.at_ns if reserved is not None else None,
        is_bound=reserved is not None and reserved.is_bound,
    )
    if told is None:
        return entry
    entry = msgspec.structs.replace(entry, run=run.id, name=run.name, sentence=told.sentence)
    if told.wait is None:
        return entry
    return msgspec.structs.replace(entry, place=told.wait.place, waiting=wait_view(told.wait))


routes = Routes("queue")


class QueueQuery(Query, frozen=True, kw_only=True):
    """Parameters of the queue view. `mine` selects the caller's own runs."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = LIMIT_MAX
    mine: bool = False


@routes.get("/queue", needs=reading("runs"))
def view_queue(call: Call, queue_views: QueueViews, query: QueueQuery) -> QueueView:
    """Return the waiting runs in scheduling order."""
    return queue_views.view(call.who, call.reach, limit=query.limit, mine=query.mine)


@routes.get("/shares", needs=reading("shares"))
def list_shares(call: Call, queue_views: QueueViews) -> ShareList:
    """List the fair shares of teams and users with their usage."""
    return queue_views.view_shares(call.who, call.reach)


@routes.put("/shares/{kind}/{name}", needs=writing("shares"))
def put_share(call: Call, pools: PoolService, kind: str, name: str, body: ShareRequest) -> ShareView:
    """Set the fair-share weight of a team or user.

    Weights matter only while several teams or users compete for devices.
    """
    return pools.put_share(call.who, kind, name, body.weight)


@routes.delete("/shares/{kind}/{name}", needs=writing("shares"))
def remove_share(call: Call, pools: PoolService, kind: str, name: str) -> ShareView:
    """Reset the fair-share weight of a team or user to 1."""
    return pools.remove_share(call.who, kind, name)
