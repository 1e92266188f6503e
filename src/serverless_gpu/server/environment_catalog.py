"""Lists the environments that runs use, with their sizes, units, owners and differences.

The database knows which runs use an environment. The environment store knows the environment's content. The catalogue
keeps a summary of recently read snapshots in memory, because a bucket answers slowly. A list reads new snapshots for at
most `READ_S` seconds. The list shows the remaining environments without sizes, and a later request reads them.

Callers with the reach `own` see the environments of their own runs. With a known address they can read any snapshot,
because an address is a capability (`environments.py`), but they see only their own runs in it.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.scan import changes
from serverless_gpu.errors import EnvironmentProblem, InvalidValue, NotFound, StorageError
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.records import environments as uses
from serverless_gpu.server.records.environments import EnvironmentUse
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.wire.blobs import (
    EnvironmentDiff,
    EnvironmentOwner,
    EnvironmentPage,
    EnvironmentRunView,
    EnvironmentSummary,
    EnvironmentUnit,
    EnvironmentView,
    SnapshotView,
)

READ_S = 0.05
PAGE_MAX = 100
SUMMARIES_MAX = 10_000
UNITS_MAX = 1_000
OWNERS_MAX = 50
RUNS_MAX = 10
TEXTS_MAX = 200
CHANGES_MAX = 500
EDITED_MAX = 10
"""Maximum number of edited units whose files a comparison names, because it reads two units for each of them."""
_ADDRESS = re.compile(r"[0-9a-f]{64}", re.ASCII)


class EnvironmentCatalog:
    """Lists, shows and compares environments. Thread-safe."""

    def __init__(self, *, clock: Clock, database: Transactions, environments: EnvironmentStore) -> None:
        self._clock = clock
        self._database = database
        self._environments = environments
        self._lock = threading.Lock()
        self._summaries: OrderedDict[str, SnapshotView] = OrderedDict()

    def page(self, owner: str | None, *, cursor: str, limit: int) -> EnvironmentPage:
        """Return environments by last use. `owner` limits the list to runs of one owner."""
        after = _parse_cursor(cursor) if cursor else None
        found = self._database.read(lambda connection: uses.uses(connection, owner, after=after, limit=limit + 1))
        shown = found[:limit]
        until_ns = self._clock.boottime_ns() + round(READ_S * 1e9)
        last = shown[-1] if len(found) > limit else None
        return EnvironmentPage(
            environments=tuple(
                EnvironmentSummary(
                    address=one.address,
                    runs=one.runs,
                    first_ns=one.first_ns,
                    last_ns=one.last_ns,
                    snapshot=self._summary(one.address, until_ns),
                )
                for one in shown
            ),
            cursor=f"{last.last_ns}.{last.address}" if last is not None else "",
        )

    def view(self, address: str, owner: str | None) -> EnvironmentView:
        """Return one environment. `owner` limits the listed runs to one owner."""
        snapshot = self._read(address)

        def work(
            connection: sa.Connection,
        ) -> tuple[EnvironmentUse | None, list[uses.OwnerUse], list[uses.EnvironmentRun]]:
            return (
                uses.use(connection, address, owner),
                uses.owners(connection, address, owner, limit=OWNERS_MAX),
                uses.latest_runs(connection, address, owner, limit=RUNS_MAX),
            )

        use, owners, latest = self._database.read(work)
        units = [
            EnvironmentUnit(
                address=member.address,
                kind=member.kind,
                name=member.name,
                version=member.version,
                size=member.size,
                files=member.files,
                root=root.kind,
            )
            for root in snapshot.roots
            for member in root.members
        ]
        units.sort(key=lambda unit: (-unit.size, unit.name, unit.address))
        facts = snapshot.facts
        return EnvironmentView(
            address=address,
            snapshot=_summary_of(snapshot),
            runs=use.runs if use is not None else 0,
            first_ns=use.first_ns if use is not None else None,
            last_ns=use.last_ns if use is not None else None,
            units=tuple(units[:UNITS_MAX]),
            owners=tuple(EnvironmentOwner(**one._asdict()) for one in owners),
            latest=tuple(EnvironmentRunView(**one._asdict()) for one in latest),
            interpreter=_interpreter_of(snapshot),
            left_out=facts.left_out[:TEXTS_MAX],
            variables=facts.variables[:TEXTS_MAX],
        )

    def compare(self, old: str, new: str) -> EnvironmentDiff:
        """Return the differences between two environments."""
        before, after = self._read(old), self._read(new)
        found = changes.compare(before, after)
        if sum(change.what == "edited" for change in found) <= EDITED_MAX:
            found = changes.differences(before, after, {}, self._environments.documents())
        variables = (set(before.facts.variables), set(after.facts.variables))
        return EnvironmentDiff(
            old=old,
            new=new,
            changes=tuple(change.sentence() for change in found[:CHANGES_MAX]),
            count=len(found),
            variables_added=tuple(sorted(variables[1] - variables[0]))[:TEXTS_MAX],
            variables_removed=tuple(sorted(variables[0] - variables[1]))[:TEXTS_MAX],
        )

    def _read(self, address: str) -> Snapshot:
        if not _ADDRESS.fullmatch(address):
            raise NotFound(f"there is no environment {address[:64]!r}", hint="an address has 64 hexadecimal digits")
        return self._environments.snapshot(address)

    def _summary(self, address: str, until_ns: int) -> SnapshotView | None:
        """Return a known summary, or read the snapshot if there is time left."""
        with self._lock:
            known = self._summaries.get(address)
        if known is not None or self._clock.boottime_ns() >= until_ns:
            return known
        try:
            made = _summary_of(self._environments.snapshot(address))
        except (EnvironmentProblem, StorageError, NotFound):
            return None
        with self._lock:
            self._summaries[address] = made
            while len(self._summaries) > SUMMARIES_MAX:
                self._summaries.popitem(last=False)
        return made


def _summary_of(snapshot: Snapshot) -> SnapshotView:
    return SnapshotView(
        python=f"{snapshot.interpreter.implementation} {snapshot.interpreter.version}",
        size=snapshot.size,
        files=snapshot.files,
        units=sum(len(root.members) for root in snapshot.roots),
        captured_ns=snapshot.facts.captured_ns or None,
    )


def _interpreter_of(snapshot: Snapshot) -> str:
    python = snapshot.interpreter
    glibc = f", glibc {python.glibc}" if python.glibc else ""
    return f"{python.implementation} {python.version}, {python.abi}, {python.platform}{glibc}"


def _parse_cursor(text: str) -> tuple[int, str]:
    at_ns, _, address = text.partition(".")
    if not (at_ns.isascii() and at_ns.isdigit() and len(at_ns) <= 19 and _ADDRESS.fullmatch(address)):
        raise InvalidValue("the cursor is not valid", hint="use the cursor of the previous page")
    return int(at_ns), address


routes = Routes("environments")


class EnvironmentsQuery(Query, frozen=True, kw_only=True):
    """Page of the list of environments: maximum number, and the `cursor` of the previous page."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = 50
    cursor: Annotated[str, msgspec.Meta(max_length=100)] = ""


class DiffQuery(Query, frozen=True, kw_only=True):
    """Addresses of the environments to compare."""

    old: Annotated[str, msgspec.Meta(max_length=64)] = ""
    new: Annotated[str, msgspec.Meta(max_length=64)] = ""


@routes.get("/environments", needs=reading("environments"))
def list_environments(call: Call, environment_catalog: EnvironmentCatalog, query: EnvironmentsQuery) -> EnvironmentPage:
    """List the environments that runs use, by last use."""
    return environment_catalog.page(_owner(call), cursor=query.cursor, limit=query.limit)


@routes.get("/environments/snapshots/{address}", needs=reading("environments"))
def show_environment(call: Call, environment_catalog: EnvironmentCatalog, address: str) -> EnvironmentView:
    """Return an environment with its units, and its use by runs that the caller may see."""
    return environment_catalog.view(address, _owner(call))


@routes.get("/environments/diff", needs=reading("environments"))
def compare_environments(call: Call, environment_catalog: EnvironmentCatalog, query: DiffQuery) -> EnvironmentDiff:
    """Return the differences between two environments."""
    return environment_catalog.compare(query.old, query.new)


def _owner(call: Call) -> str | None:
    return None if call.reach == AccessReach.ALL else call.who.name
