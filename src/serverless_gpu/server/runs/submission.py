"""Checks each submitted run, encrypts its context, stores it once, and acknowledges it.

    request ─▶ valid? ─▶ are its blobs stored? ─▶ below the limit? ─▶ run + event + audit, one transaction ─▶ wakeup

The client generates the run identifier and stores the identifier on disk before the request. If a client repeats a
request after a lost answer, the server returns the existing run. If a different request has the same identifier, the
server raises a conflict and changes nothing.

The server does not unpickle the call. The database stores only the encrypted context, because the context contains the
caller's environment variables. `QueueLimits` limits the number of waiting runs per principal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.environment.documents import Packages
from serverless_gpu.errors import IdempotencyConflict, InvalidValue, NotFound, ServerStorageFull, TooLarge
from serverless_gpu.model import secrets
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import (
    RANKS_MAX,
    SECONDS_MAX,
    SPEC_VERSION,
    TAG_CHARACTERS_MAX,
    TAGS_MAX,
    Command,
    Function,
    Kernel,
    RunSpec,
    check_command,
)
from serverless_gpu.server.budgets.budget_admission import BudgetAdmission
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.caller import Caller, check_range, check_text
from serverless_gpu.server.core.hub import SCHEDULER, Hub, run_key
from serverless_gpu.server.core.server_key import Keys, Sealer
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.policies import PackagesNotLoaded, PolicyAdmission, PolicyInputs
from serverless_gpu.server.records import audit, events, runs
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.events import StoredEvent
from serverless_gpu.server.records.runs import NewRun, StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.scheduling.feasibility import Feasibility, FeasibilityCache
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons
from serverless_gpu.server.storage.blobs import Blobs, check_reference
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.wire.base import INLINE_BYTES_MAX, LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.runs import RunRequest, RunView, Target

_OWNERS_MAX = 10_000
CONTEXT_BYTES_MAX = 2 << 20
RETRIES_MAX = 100
ARGUMENTS_MAX = 200
ARGUMENT_CHARACTERS_MAX = 200_000
"""Maximum number and total length of a call's arguments as text."""
VERSION_CHARACTERS_MAX = 32
_HEXADECIMAL = frozenset("0123456789abcdef")


class SubmissionService:
    """Accepts runs into the queue."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        keys: Keys,
        sealer: Sealer,
        blobs: Blobs,
        environments: EnvironmentStore,
        sentences: WaitReasons,
        waiting_room: QueueLimits,
        measures: ServerMetrics,
        feasible: FeasibilityCache,
        low: Callable[[], str],
        budget_admission: BudgetAdmission,
        feasibility: Feasibility,
        policy_admission: PolicyAdmission,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._keys = keys
        self._sealer = sealer
        self._blobs = blobs
        self._environments = environments
        self._sentences = sentences
        self._waiting_room = waiting_room
        self._measures = measures
        self._feasible = feasible
        self._low = low
        self._budget_admission = budget_admission
        self._feasibility = feasibility
        self._policy_admission = policy_admission

    def submit(self, who: Caller, request: RunRequest) -> RunView:
        """Store a run durably and return its view.

        The view has `deduplicated` set if the server has already stored the same request.
        """
        check(request, who)
        digest = self._keys.fingerprint(msgspec.json.encode(request, order="deterministic"))
        has_room = self._waiting_room.enter(who.name)
        low = self._low()
        payload = request.spec.payload
        has_bytes = bool(request.snapshot) or (isinstance(payload, Function) and payload.call is not None)
        # Look up an existing run first, because a repeated request needs no further checks.
        if low or not has_room or has_bytes:
            before = self._database.read(lambda connection: runs.find(connection, request.id))
            if before is not None:
                return self._same(before, who, digest)
            if low:
                raise ServerStorageFull(f"the server accepts no new runs: {low}", hint="submit the run again later")
            self._check_bytes(request)
            if not has_room:
                self._find_room(who)
        new = NewRun(
            id=request.id,
            owner=who.name,
            spec=request.spec,
            target=request.target,
            request_sha256=digest,
            context_sealed=self._sealer.seal(bytes(request.context), about=request.id),
            call=request.call,
            snapshot=request.snapshot,
            client_version=request.version,
            member_of=who.teams,
            arguments=request.arguments,
        )
        at_ns = self._clock.wall_ns()
        run, is_new = self._written(new, who, at_ns)
        if not is_new:
            return self._same(run, who, digest)
        self._measures.submitted.inc()
        server_log.note(run=run.id)
        faults.reach("after_submit_before_answer")
        self._hub.touch(SCHEDULER)
        self._hub.touch(run_key(run.id))
        return run_views.run_view(run, reader=who.name)

    def _same(self, run: StoredRun, who: Caller, digest: str) -> RunView:
        if run.owner != who.name or run.request_sha256 != digest:
            raise IdempotencyConflict(
                f"run {run.id} already exists with a different request",
                hint="give every run its own identifier",
            )
        return run_views.run_view(run, told=self._sentences.told(run.id), deduplicated=True, reader=who.name)

    def _written(self, new: NewRun, who: Caller, at_ns: int) -> tuple[StoredRun, bool]:
        """Store a run, after reading the package lists that the run's policy compares."""
        packages: dict[str, Packages | None] = {}
        brought = PolicyInputs(snapshot=new.snapshot, packages=packages)
        while True:  # Each iteration reads the package lists that were missing in the previous iteration.
            try:
                return self._database.write(lambda connection: self._create(connection, new, who, at_ns, brought))
            except PackagesNotLoaded as unread:
                packages |= self._policy_admission.read_packages(unread.addresses)

    def _create(
        self, connection: sa.Connection, new: NewRun, who: Caller, at_ns: int, brought: PolicyInputs
    ) -> tuple[StoredRun, bool]:
        before = runs.find(connection, new.id) if runs.exists(connection, new.id) else None
        if before is not None:
            return before, False
        allowed = self._policy_admission.allow(connection, new.spec, who, brought)
        new = msgspec.structs.replace(new, spec=allowed.spec, pool=allowed.pool)
        self._budget_admission.refuse(connection, allowed, who)
        if not self._feasibility.refuse(connection, runs.described(new, at_ns=at_ns)):
            self._feasible.defer(new.id)
        run = runs.insert(connection, new, at_ns=at_ns)
        events.add(connection, [StoredEvent(run_id=new.id, seq=1, fence=0, at_ns=at_ns, state=State.QUEUED)])
        audit.record(connection, who=who, action=Action.RUN_CREATE, subject=new.id, now_ns=at_ns)
        return run, True

    def _check_bytes(self, request: RunRequest) -> None:
        payload = request.spec.payload
        if isinstance(payload, Function) and payload.call is not None:
            missing = self._blobs.missing(payload.call.parts)
            if missing:
                raise NotFound(
                    f"{len(missing)} parts of the call are not on the server, for example {missing[0][:12]}",
                    hint="upload the missing parts first: PUT /blobs/{digest}",
                )
        if request.snapshot:
            self._environments.need(request.snapshot)

    def _find_room(self, who: Caller) -> None:
        most = self._settings.runs_waiting_max
        waiting = self._database.read(lambda connection: runs.waiting_of(connection, who.name, at_most=most))
        if waiting >= most:
            raise TooLarge(
                f"{who.name} already has the maximum of {waiting} waiting runs",
                hint="wait until some runs have started, or cancel waiting runs",
            )
        self._waiting_room.counted(who.name, most - waiting - 1)


class QueueLimits:
    """Caches the number of free queue slots of each owner.

    Each new run takes one free slot of its owner. If the cache has no free slot, the server counts the waiting runs in
    the database. The cached number is wrong by at most the number of runs that have returned to the queue since the
    count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room: dict[str, int] = {}

    def enter(self, owner: str) -> bool:
        """Take a free queue slot. Return False if the caller must count the waiting runs first."""
        with self._lock:
            room = self._room.get(owner, 0)
            if room > 0:
                self._room[owner] = room - 1
            return room > 0

    def counted(self, owner: str, free: int) -> None:
        """Cache the number of an owner's free slots after a count."""
        with self._lock:
            if len(self._room) >= _OWNERS_MAX:
                self._room.clear()
            self._room[owner] = free


def check(request: RunRequest, who: Caller) -> None:
    """Refuse a request that is invalid in every state of the server."""
    if created_wall_ns(request.id) is None:
        raise InvalidValue(
            f"{request.id[:40]!r} is not a valid run identifier",
            hint="use a client-generated run identifier of 26 characters",
        )
    check_spec(request.spec, who)
    _check_payload(request)
    _check_origin(request)


def check_spec(spec: RunSpec, who: Caller) -> None:
    """Refuse a run with an invalid spec."""
    if spec.spec_version != SPEC_VERSION:
        raise InvalidValue(
            f"the run uses spec version {spec.spec_version}, but this server supports version {SPEC_VERSION}",
            hint="install the same version on client and server",
        )
    check_text("name", spec.name, LABEL_CHARACTERS_MAX)
    for name in ("pool", "team", "policy"):
        check_text(name, getattr(spec, name) or "", NAME_CHARACTERS_MAX)
    if spec.team is not None and spec.team not in who.teams:
        raise InvalidValue(
            f"{who.name} is not a member of team {spec.team[:NAME_CHARACTERS_MAX]!r}",
            hint=f"use one of your teams ({', '.join(who.teams) or 'none'}), or join a team with `sgpu team join`",
        )
    secrets.check(spec.secrets, spec.secret_variables)
    if len(spec.tags) > TAGS_MAX:
        raise TooLarge(f"the run has {len(spec.tags)} tags, over the limit of {TAGS_MAX}")
    for key, value in spec.tags.items():
        check_text("a tag", key, TAG_CHARACTERS_MAX)
        check_text(f"tag {key!r}", value, TAG_CHARACTERS_MAX)
    _check_numbers(spec)


def _check_numbers(spec: RunSpec) -> None:
    resources = spec.resources
    check_range("gpus", resources.gpus, 1, RANKS_MAX)
    check_range("cpus", resources.cpus, 1, RANKS_MAX)
    check_range("memory", resources.memory_bytes, 1, 2**60)
    check_text("gpu_type", resources.gpu_type or "", LABEL_CHARACTERS_MAX)
    check_range("retries", spec.retries, 0, RETRIES_MAX)
    check_range("grace", spec.grace_s, 0, SECONDS_MAX)
    check_range("timeout", spec.timeout_s, 0, SECONDS_MAX)
    check_range("max_run", spec.max_run_s, 0, SECONDS_MAX)
    check_range("idle_timeout", spec.idle_timeout_s, 0, SECONDS_MAX)
    check_range("hang_timeout", spec.hang_timeout_s, 0, SECONDS_MAX)
    check_range("hang_warning", spec.hang_warning_s, 0, SECONDS_MAX)
    for rank in spec.ranks_log or ():
        check_range("ranks_log", rank, 0, RANKS_MAX)


def _check_payload(request: RunRequest) -> None:
    called = request.spec.payload
    match called:
        case Kernel():
            raise InvalidValue(
                "notebook kernels cannot run on a server yet", hint="submit a function or a command instead of a kernel"
            )
        case Command():
            if request.call is not None:
                raise InvalidValue("a command must not contain a pickled call")
            check_command(called)
        case Function():
            if (request.call is None) == (called.call is None):
                raise InvalidValue("the pickled call must come either with the request or as a blob")
            if called.call is not None:
                check_reference(called.call)
            elif len(request.call or b"") > INLINE_BYTES_MAX:
                raise TooLarge(
                    f"the pickled call in the request has {len(request.call or b'')} bytes",
                    hint="upload the call as a blob",
                )


def _check_origin(request: RunRequest) -> None:
    """Refuse invalid values in the origin and imports of a run."""
    target = request.target
    check_target(target)
    check_text("version", request.version, VERSION_CHARACTERS_MAX)
    _check_arguments(request.arguments or {})
    if request.spec.environment == "snapshot":
        if len(request.snapshot) != 64 or not set(request.snapshot) <= _HEXADECIMAL:
            raise InvalidValue(f"{request.snapshot[:80]!r} is not the address of a snapshot")
    elif request.snapshot or not target.machine:
        raise InvalidValue(
            "ranks that import the caller's own files need the machine of these files, and no snapshot",
            hint="use env='snapshot' to run a copy of the files anywhere",
        )
    context = bytes(request.context)
    if len(context) > CONTEXT_BYTES_MAX:
        raise TooLarge(
            f"the caller's context has {len(context)} bytes, over the limit of {CONTEXT_BYTES_MAX}",
            hint="remove very large environment variables before the call",
        )
    if not context.lstrip().startswith(b"{"):
        raise InvalidValue("the caller's context is not a JSON object")


def _check_arguments(arguments: dict[str, str]) -> None:
    # Arguments contain any text, which readers of the run see. PostgreSQL stores no NUL characters in JSON text.
    characters = sum(len(name) + len(text) for name, text in arguments.items())
    if len(arguments) > ARGUMENTS_MAX or characters > ARGUMENT_CHARACTERS_MAX:
        raise TooLarge(
            f"the text of the arguments has {len(arguments)} entries and {characters:,} characters, over the limits of "
            f"{ARGUMENTS_MAX} and {ARGUMENT_CHARACTERS_MAX:,}",
            hint="install the same version on client and server",
        )


def check_target(target: Target) -> None:
    """Refuse a target that no node can match."""
    for name in ("python", "platform", "machine", "caller"):
        check_text(name, getattr(target, name), NAME_CHARACTERS_MAX)
