"""Implements the engine for Ray clusters: reserves gangs and keeps an agent running on each node.

    scheduler, reconciler ─▶ methods: answers from memory          this process never imports Ray
                                 │
    a thread, every second ──────┼─▶ child (`driver_process.py`) ─▶ nodes, placement groups    `ray_tables.py`
    worker threads, on demand ───┘        reserve, release, start agents                       translates them

The engine uses Ray for membership, reservations, starting agents, and detecting dead nodes. User code never runs in Ray
processes. An attempt is alive while it holds its lease from the server. Each gang has one detached placement group. The
engine pins the group's bundles to the scheduled nodes. The engine removes a group that Ray cannot reserve immediately,
because Ray does not order or pack waiting groups.

The engine stores reserved gangs and known nodes in files (`ReservationFiles`). A new server process can read the files
before Ray answers. If the Ray head restarts without its state, the engine reserves the gangs again.

Failure cases:

- If the Ray head does not answer, the engine starts a new driver process. Running attempts continue. New gangs wait.

- If Ray's node table marks a node as dead, the engine reports the node as lost.

- If an actor exits or does not answer, the engine reads Ray's node table again, because the node may still be alive. A
  new actor then checks the node's agent.

- If the agent of a node cannot start, the engine reports the node as lost until the agent starts.

- If Ray answers a request late, the engine kills the driver process. The next poll of Ray's tables shows the effects of
  the late request.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.engines.base import (
    Engine,
    EngineNode,
    Gang,
    Impossible,
    NodeLost,
    NodeUp,
    Placed,
    Request,
    Waiting,
)
from serverless_gpu.engines.ray import ray_tables, uplink_launcher
from serverless_gpu.engines.ray.driver_client import PROGRAM_DIGEST, DriverLink, RayAccess, RayProblem, Unanswered
from serverless_gpu.engines.ray.ray_tables import GroupState, KnownNode, NodeRow, PlacementGroup, plain
from serverless_gpu.engines.ray.start_arguments import NODE_FILE
from serverless_gpu.json_codec import from_json

SOON_S = 0.5
"""Seconds that `submit` waits for Ray, which usually answers within milliseconds."""
LOOK_EVERY_S = 1.0
_LOOK_S = 5.0
_PATIENCE_S = 0.3  # Ray frees released resources within 0.1 s.
RESERVE_S = 15.0
_REPAIR_EVERY = 5
_REPAIR_OFTEN = 30  # Number of polls with repairs after a reconnect. Nodes rejoin one by one.
_AT_ONCE = 8
_STALE_S = 10.0
_CLOSE_S = 1.0


class _Reservation:
    """A pending request to Ray to create the placement group of a gang."""

    def __init__(self, gang: Gang, began_ns: int) -> None:
        self.gang, self.began_ns = gang, began_ns  # boottime
        self.answer: Placed | Waiting | Impossible | None = None
        self.unwanted = False  # True if the scheduler has released the gang since the request.
        self.done = threading.Event()  # The event signals that `answer` is set.


class RayEngine(Engine):
    """Runs gangs on a Ray cluster.

    `directory` contains the engine's files. The engine creates `directory` if needed. `python` is an interpreter that
    has the cluster's version of Ray. The engine calls `news` from any thread when the scheduler should submit waiting
    gangs again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        access: RayAccess,
        python: str,
        news: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._access, self._news, self._clock = access, news, clock or SystemClock()
        self._memory = ReservationFiles(directory)
        self._link = DriverLink(access, python, directory / "ray.log", self._clock)
        self._agents = RayAgents(self._link, self._clock)
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._known: dict[str, KnownNode] = self._memory.nodes()
        self._placed: dict[str, Gang] = self._memory.gangs()
        self._kept_at: dict[str, int] = {}
        self._groups: dict[str, PlacementGroup] = {}
        self._reserving: dict[str, _Reservation] = {}
        self._releasing: set[str] = set()
        self._released_at: dict[str, int] = {}
        self._told: dict[str, str] = {}
        self._looks, self._found_at = 0, 0
        self._busy, self._busy_lock = set[str](), threading.Lock()
        self._looked, self._wake, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._workers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ray")
        self._thread = threading.Thread(target=self._run, name="ray engine", daemon=True)
        self._thread.start()

    def ready(self, timeout_s: float) -> bool:
        """Wait for the first poll of Ray's tables. Return False on a timeout."""
        return self._looked.wait(timeout_s)

    # --- the Engine interface ----------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that the scheduler can use."""
        with self._lock:
            return [ray_tables.engine_node(one.row) for one in self._now().values() if not one.lost]

    def has(self, node: str) -> bool:
        """Return True if Ray has ever reported a node of this name, even if Ray no longer lists the node."""
        with self._lock:
            return node in self._known

    def plan(self, gang: Gang) -> Request:
        """Return the reservation that `submit` would make."""
        return Request(gang=gang, text=ray_tables.in_words(gang))

    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Reserve a gang, or return Waiting if Ray does not answer within `SOON_S` seconds."""
        gang = request.gang
        with self._lock:
            found = self._reservation(gang)
            if not isinstance(found, _Reservation):
                return found
            others = [one for one in self._reserving.values() if one is not found and not one.done.is_set()]
            is_slow = any(self._age_s(one) > SOON_S for one in others)
        found.done.wait(0 if is_slow else SOON_S)
        with self._lock:
            if found.answer is None or found.unwanted:
                return Waiting(sentence=f"Ray is reserving {gang.id}")
            if self._reserving.get(gang.id) is found:
                del self._reserving[gang.id]
            return found.answer

    def release(self, gang: str) -> None:
        """Release a gang, and remove the gang's placement group when Ray answers."""
        with self._lock:
            reservation = self._reserving.get(gang)
            if reservation is not None and not reservation.done.is_set():
                reservation.unwanted = True
                return
            self._reserving.pop(gang, None)
            self._give_back(gang)

    def recover(self) -> Sequence[str]:
        """Return the gangs that Ray or the engine's files list as reserved."""
        with self._lock:
            reserved = {*self._placed, *(name for name, group in self._groups.items() if not group.is_under_way())}
            unwanted = {name for name, one in self._reserving.items() if one.unwanted}
            return sorted(reserved - self._releasing - unwanted)

    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Return the events of nodes that appeared or disappeared since the last call."""
        with self._lock:
            now = self._now()
            events = ray_tables.node_changes(self._told, now)
            self._told = {name: one.lost for name, one in now.items()}
            return events

    def close(self) -> None:
        """Finish pending releases, then kill the driver process. Ray, reservations and agents continue."""
        with self._lock:
            self._released.wait_for(lambda: not self._releasing or bool(self._link.trouble), _CLOSE_S)
        self._closed.set()
        self._wake.set()
        self._link.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._thread.join()

    # --- gangs ------------------------------------------------------------------------------------------------------

    def _reservation(self, gang: Gang) -> _Reservation | Placed | Waiting | Impossible:
        """Return the known answer for a gang, or the gang's pending reservation.

        Start a reservation for the gang if none is pending.
        """
        if gang.id in self._placed:
            return Placed(gang=self._placed[gang.id])
        if gang.id in self._releasing:
            return Waiting(sentence=f"Ray is releasing {gang.id}")
        under_way = self._reserving.get(gang.id)
        if under_way is not None and not (under_way.done.is_set() and self._age_s(under_way) > _STALE_S):
            return under_way
        if gang.id in self._groups and self._groups[gang.id].is_reserved():
            self._place(gang)
            return Placed(gang=gang)
        refused = ray_tables.refusal(gang, self._now())
        if self._link.trouble and (refused is None or not self._looked.is_set()):
            return Waiting(sentence=self._link.trouble)
        if refused is not None:
            return refused
        reservation = _Reservation(gang, self._clock.boottime_ns())
        self._reserving[gang.id] = reservation
        self._start(f"reserve {gang.id} {reservation.began_ns}", partial(self._reserve, reservation))
        return reservation

    def _reserve(self, reservation: _Reservation) -> None:
        """Ask Ray to reserve a gang and record the answer."""
        gang = reservation.gang
        with self._lock:
            known = dict(self._known)
        answer: Placed | Waiting | Impossible
        try:
            answer = self._ask_for(gang, known)
        except (Unanswered, RayProblem) as error:
            answer = Waiting(sentence=self._link.trouble or f"Ray did not reserve {gang.id}: {error}")
            self._wake.set()
        with self._lock:
            reservation.answer = answer
            if isinstance(answer, Placed):
                self._reserving.pop(gang.id, None)
                self._place(gang)
            if reservation.unwanted:
                self._reserving.pop(gang.id, None)
                self._give_back(gang.id)
        reservation.done.set()
        if self._age_s(reservation) > SOON_S:
            self._news()

    def _ask_for(self, gang: Gang, known: Mapping[str, KnownNode]) -> Placed | Waiting | Impossible:
        said = self._link.ask(
            "reserve",
            RESERVE_S,
            name=ray_tables.gang_name(self._access.pool, gang.id),
            bundles=ray_tables.bundles(gang, known),
            patience_s=_PATIENCE_S,
        )
        group = ray_tables.group(gang.id, ray_tables.mapping(said.get("group")))
        if group.state is GroupState.CREATED:
            return Placed(gang=gang)
        now = ray_tables.update_nodes(known, ray_tables.mappings(said.get("nodes")), self._clock.boottime_ns())
        return ray_tables.placement_refusal(gang, group, now, ray_tables.free(said.get("free")))

    def _place(self, gang: Gang) -> None:
        self._placed[gang.id] = gang
        self._kept_at[gang.id] = self._looks
        self._memory.keep(gang)

    def _give_back(self, gang: str) -> None:
        """Delete the record of a gang, and ask Ray to remove the gang's placement group."""
        was_placed = self._placed.pop(gang, None) is not None
        self._kept_at.pop(gang, None)
        self._memory.forget(gang)
        if (was_placed or gang in self._groups) and gang not in self._releasing:
            self._releasing.add(gang)
            self._start(f"release {gang}", partial(self._release, gang))

    def _release(self, gang: str) -> None:
        """Ask Ray to remove a placement group. After a failure, the engine tries again at the next poll."""
        try:
            self._link.ask("release", RESERVE_S, name=ray_tables.gang_name(self._access.pool, gang))
        except (Unanswered, RayProblem):
            self._wake.set()
            return
        with self._lock:
            self._releasing.discard(gang)
            self._groups.pop(gang, None)
            self._released_at[gang] = self._looks
            self._released.notify_all()
        self._news()

    # --- the polling thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            was_there = not self._link.trouble
            if self._link.connect(self._closed):
                self._found_at = self._found_at if was_there else self._looks
                self._look()
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _look(self) -> None:
        """Read Ray's tables, then start pending releases, repairs and agent checks."""
        with self._lock:
            self._looks += 1
        try:
            said = self._link.ask("look", _LOOK_S)
        except (Unanswered, RayProblem) as error:
            self._link.failed(error)
            return
        with self._lock:
            before = {name for name, one in self._now().items() if not one.lost}
            self._take(said)
            now = self._now()
            known, releasing = dict(self._known), set(self._releasing)
        self._looked.set()
        self._memory.note(known)
        for gang in releasing:
            self._start(f"release {gang}", partial(self._release, gang))
        self._repair(known)
        for row in self._agents.due(known):
            self._start(f"agent {row.id}", partial(self._have_agent, row))
        if before != {name for name, one in now.items() if not one.lost}:
            self._news()

    def _take(self, said: Mapping[str, object]) -> None:
        """Store the polled tables of Ray, except for gangs that were released during the poll."""
        self._known = ray_tables.update_nodes(
            self._known, ray_tables.mappings(said.get("nodes")), self._clock.boottime_ns()
        )
        self._released_at = {gang: look for gang, look in self._released_at.items() if look >= self._looks}
        found = ray_tables.groups(self._access.pool, ray_tables.mappings(said.get("groups")))
        self._groups = {name: group for name, group in found.items() if name not in self._released_at}
        for name, group in self._groups.items():
            is_orphan = group.is_under_way() and name not in self._placed and name not in self._reserving
            if is_orphan and name not in self._releasing:  # The requesting driver process was killed.
                self._releasing.add(name)

    def _repair(self, known: Mapping[str, KnownNode]) -> None:
        """Restore the placement groups that a restarted Ray head has lost."""
        if self._looks % _REPAIR_EVERY and self._looks - self._found_at > _REPAIR_OFTEN:
            return
        with self._lock:
            missing = [
                gang
                for name, gang in self._placed.items()
                if name not in self._groups and self._kept_at.get(name, 0) < self._looks
            ]
        for gang in missing:
            if ray_tables.refusal(gang, known) is None:
                self._start(f"again {gang.id}", partial(self._reserve_again, gang))

    def _reserve_again(self, gang: Gang) -> None:
        with self._lock:
            known = dict(self._known)
        try:
            self._ask_for(gang, known)
        except (Unanswered, RayProblem):
            self._wake.set()
        with self._lock:
            if gang.id not in self._placed:  # The scheduler released the gang during the request.
                self._releasing.add(gang.id)

    def _have_agent(self, row: ray_tables.NodeRow) -> None:
        if self._agents.have(row):
            self._wake.set()  # Ray's node table shows if the node of a failed actor is dead.

    def _now(self) -> dict[str, KnownNode]:
        return ray_tables.with_problems(self._known, self._agents.problems())

    def _age_s(self, reservation: _Reservation) -> float:
        return (self._clock.boottime_ns() - reservation.began_ns) / 1e9

    def _start(self, what: str, work: Callable[[], None]) -> None:
        """Run a task in a worker thread, unless the same task is running or the engine is closed."""
        with self._busy_lock:
            if what in self._busy:
                return
            self._busy.add(what)

        def do() -> None:
            try:
                work()
            finally:
                with self._busy_lock:
                    self._busy.discard(what)

        with contextlib.suppress(RuntimeError):
            self._workers.submit(do)


class ReservationFiles:
    """Stores the reserved gangs and the known nodes of one engine in files.

        <directory>/gangs/<run>:<fence>     the gang's shares
        <directory>/nodes.json              rows of Ray's table, including lost nodes

    The engine ignores unreadable files, because Ray's tables contain the same information.
    """

    def __init__(self, directory: Path) -> None:
        self._gangs, self._nodes = directory / "gangs", directory / "nodes.json"
        self._gangs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._noted: dict[str, KnownNode] = {}

    def gangs(self) -> dict[str, Gang]:
        """Return the stored gangs by identifier."""
        found = {}
        for name in os.listdir(self._gangs):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                gang = from_json((self._gangs / name).read_bytes(), Gang)
                found[gang.id] = gang
        return found

    def keep(self, gang: Gang) -> None:
        """Store a gang. A full disk is not an error."""
        with contextlib.suppress(OSError):
            _write_file(self._gangs / gang.id, msgspec.json.encode(gang))

    def forget(self, gang: str) -> None:
        """Delete the file of a gang."""
        with contextlib.suppress(OSError):
            (self._gangs / gang).unlink(missing_ok=True)

    def nodes(self) -> dict[str, KnownNode]:
        """Return the stored nodes by name. A missing node's timeout restarts from zero."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._noted = from_json(self._nodes.read_bytes(), dict[str, KnownNode])
        return {name: msgspec.structs.replace(one, missing_ns=None) for name, one in self._noted.items()}

    def note(self, nodes: Mapping[str, KnownNode]) -> None:
        """Store the known nodes after a change."""
        if dict(nodes) != self._noted:
            self._noted = dict(nodes)
            with contextlib.suppress(OSError):
                _write_file(self._nodes, msgspec.json.encode(self._noted))


def _write_file(path: Path, data: bytes) -> None:
    temporary = path.parent.parent / f".{path.name}.tmp" if path.parent.name == "gangs" else path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.replace(path)


AGENT_LOOK_EVERY_S = 5.0
_ANSWER_S = 60.0
_SILENT_MAX = 3


class RayAgents:
    """Checks the agents of a cluster's nodes every few seconds through a detached actor on each node.

    The actor starts the agent outside Ray's process tree, so that the agent survives the actor. The next actor finds
    the running agent. A node has a problem if its actor reports a problem. A node also has a problem if several
    consecutive actors do not answer while Ray lists the node as alive.
    """

    def __init__(self, link: DriverLink, clock: Clock) -> None:
        self._link, self._clock = link, clock
        self._lock = threading.Lock()
        self._asking: set[str] = set()
        self._asked_ns: dict[str, int] = {}
        self._silent: dict[str, int] = {}
        self._problems: dict[str, str] = {}

    def problems(self) -> dict[str, str]:
        """Return the problem of each node without an agent, by node name."""
        with self._lock:
            return dict(self._problems)

    def due(self, known: Mapping[str, KnownNode]) -> list[NodeRow]:
        """Return the nodes whose agents need a check now, and record the checks as pending."""
        now_ns = self._clock.boottime_ns()
        with self._lock:
            self._asked_ns = {
                node: at_ns for node, at_ns in self._asked_ns.items() if now_ns - at_ns < AGENT_LOOK_EVERY_S * 1e9
            }
            self._problems = {
                name: text for name, text in self._problems.items() if name in known and not known[name].lost
            }
            rows = [
                one.row
                for one in known.values()
                if not one.lost and one.missing_ns is None and one.row.id not in {*self._asking, *self._asked_ns}
            ]
            self._asking |= {row.id for row in rows}
            return rows

    def have(self, row: NodeRow) -> bool:
        """Start the agent of a node if necessary. Return True if the node's actor did not answer."""
        problem, is_silent = "", False
        try:
            said = self._link.ask(
                "agent",
                _ANSWER_S,
                node=row.id,
                actor=f"agent:{row.id}:{PROGRAM_DIGEST}",
                program=(NODE_FILE, uplink_launcher.LAUNCHER, uplink_launcher.MODULE),
            )
            problem = plain(said.get("problem"))
        except (Unanswered, RayProblem) as error:
            problem, is_silent = plain(error), True
        with self._lock:
            self._asking.discard(row.id)
            self._asked_ns[row.id] = self._clock.boottime_ns()
            self._silent[row.id] = self._silent.get(row.id, 0) + 1 if is_silent else 0
            if not problem:
                self._problems.pop(row.name, None)
            elif not is_silent or (self._silent[row.id] >= _SILENT_MAX and not self._link.trouble):
                self._problems[row.name] = f"has no agent: {problem}"
        return is_silent
