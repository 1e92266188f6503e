"""Decides how the nodes of a gang connect to each other, or cancels the attempt.

    report with an offer ─▶ memory   all offers arrived ─▶ sent to each node until it reports its reach
    report with a reach  ─▶ memory   all arrived, no node has failed or is silent ─▶ `rendezvous.choose`
         ├─ Chosen ─▶ stored, then in every answer to the first node until user code begins, then to the other nodes
         └─ Apart, or a limit has passed (`look`) ─▶ called off, stored: its nodes cannot connect

User code of a gang waits for `chosen`. A single SQL statement therefore ensures that an attempt never has both `chosen`
and `called_off`. If the server calls a gang off, the gang's user code never begins. The transaction that calls off a
gang also marks as refused every node without any report. If a refused node reports later, the server answers that the
attempt has ended. Other nodes of the gang end the attempt with a final report, as after any failure.

`RendezvousStates` exists only in memory. Nodes repeat their offer and reach in every report until user code begins.
After a restart, the server receives all offers and reaches again. A server restart also restarts the rendezvous time
limits.

Failure cases:

- The server crashes. The server sends the rendezvous address to nodes only after the commit of `chosen`. Every answer
  to a node after the commit contains the rendezvous address.

- A node reports an offer that differs from its first offer. The server uses only the node's first offer, because other
  nodes have already tried the addresses in the first offer.

- Before the rendezvous, a caller stops the run, or a node fails. The next call of `look` calls the gang off. The
  attempt's end reason remains the stop request or the node failure.

- One node of a gang is silent after all other nodes have reported. The server chooses no address until the silent node
  reports or the time limit has passed.

- A node sends neither reports nor heartbeats before the rendezvous. The server calls the gang off and marks the node as
  refused. The next attempt of the run does not wait for the refused node. The called-off attempt does not count against
  the run's attempt limit. The server also refuses a node that becomes silent after the server has called off the node's
  gang.

- An operator restores the server from a backup. The restored server calls no gang off, because user code may have begun
  after the backup. If user code runs on some nodes while other nodes wait for the lost rendezvous address, the server
  ends the gang.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, StaleAttempt
from serverless_gpu.model.lifecycle.attempt import ACTIVE, Reason, State
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause
from serverless_gpu.model.lifecycle.rendezvous import (
    ADDRESSES_MAX,
    PROBLEM_CHARACTERS_MAX,
    SAVED_MAX,
    Apart,
    Chosen,
    CrewReach,
    Offer,
    choose,
    is_interface,
)
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, IllegalRunTransition
from serverless_gpu.server.core.hub import Hub, node_key
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.liveness import Leases, Presence
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, ReportRequests, TransitionResult
from serverless_gpu.server.records import attempts, runs
from serverless_gpu.server.records.active_runs import ActiveRun
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.crews import CrewId, Gang, StoredCrew
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.wire.agents import Report, ReportAnswer

_log = logging.getLogger(__name__)
_Work = tuple[StoredAttempt, tuple[TransitionResult, ...]]


COME_S = 300.0
"""Seconds that the server waits for a silent node before it calls the gang off."""
MEET_S = 120.0
"""Maximum seconds from the last offer until the nodes have tested each other's addresses."""
TOTAL_S = 3_600.0
"""Maximum seconds that the server waits for the offers of nodes that still report, for example during downloads."""
_ADDRESS = re.compile(r"[0-9A-Za-z:.%_-]{1,64}")
_MICROSECONDS_MAX = 1 << 40


def check_meeting(attempt: StoredAttempt, crew: StoredCrew, said: Report) -> None:
    """Refuse rendezvous offers and reaches that contain impossible values."""
    if said.offer is None and said.reach is None:
        return
    gang, number = attempt.gang, crew.number
    if attempt.num_nodes == 1:
        raise InvalidValue(f"attempt {gang} runs on one node and has no rendezvous")
    for each in (said.offer, said.reach):
        if each is not None and each.crew != number:
            raise InvalidValue(f"node {number} of attempt {gang} reports for node {each.crew}")
    if said.offer is not None:
        _check_offer(gang, number, said.offer)
    if said.reach is not None:
        _check_reach(gang, number, said.reach, of=attempt.num_nodes)


class RendezvousService:
    """Chooses the rendezvous address of gangs on several nodes."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        leases: Leases,
        looks: ReportRequests,
        presence: Presence,
        meetings: RendezvousStates,
        announcer: Announcer,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._leases = leases
        self._looks = looks
        self._presence = presence
        self._meetings = meetings
        self._announcer = announcer

    def hear(self, attempt: StoredAttempt, crew: StoredCrew, said: Report) -> None:
        """Store a node's offer or reach. After the gang's last report, choose the rendezvous address."""
        if attempt.num_nodes == 1 or attempt.ended_ns is not None or crew.ended_ns is not None:
            return
        if attempt.chosen_json is not None or attempt.called_off:
            return
        now_ns = self._clock.boottime_ns()
        known, is_complete = self._meetings.hear(
            crew.id, of=attempt.num_nodes, offer=said.offer, reach=said.reach, now_ns=now_ns
        )
        if said.offer is not None:
            faults.reach("after_offer_before_answer")
        if has_met(attempt):
            return
        if is_complete:
            self._have_look(attempt, but=crew.number)
        self._decide(attempt, known, now_ns=now_ns, but=crew.number)

    def told(self, run: StoredRun, crew: StoredCrew, answer: ReportAnswer) -> ReportAnswer:
        """Add rendezvous news to the answer for a node whose user code waits, unless the node must end."""
        attempt = run.attempt
        assert attempt is not None
        is_ending = answer.stale or answer.stop is not None or answer.peer_failed or crew.halt_json is not None
        if is_ending or attempt.num_nodes == 1 or crew.began or crew.ended_ns is not None:
            return answer
        if attempt.chosen is not None:
            # The supervisor of rank 0 uses the rendezvous port until the supervisor receives the address. While the
            # supervisor uses the rendezvous port, connections of other ranks would fail. Ray nodes need not wait for
            # rank 0, because they retry connections.
            is_free = crew.number == 0 or attempt.crews[0].began or run.spec.ray is not None
            return msgspec.structs.replace(answer, chosen=attempt.chosen) if is_free else answer
        known = self._meetings.find((attempt.run_id, attempt.fence))
        if known is None or has_met(attempt):
            return answer
        return msgspec.structs.replace(answer, offers=known.offers_for(crew.number))

    def look(self, active: Sequence[ActiveRun], now_ns: int) -> None:
        """Call off gangs that exceed a rendezvous time limit or end before their rendezvous."""
        gone = {run.id: self._gone(run, now_ns) for run in active if run.num_nodes > 1}
        for one in active:
            if one.called_off and gone[one.id]:
                self._end_silent(one, gone[one.id])
        waiting = [run for run in active if run.num_nodes > 1 and not run.has_met]
        half = [run for run in active if run.num_nodes > 1 and run.began and not run.chosen and not run.called_off]
        self._meetings.keep({(run.id, run.fence) for run in (*waiting, *half)})
        for one in half:
            known = self._meetings.see((one.id, one.fence), now_ns=now_ns)
            if now_ns - known.since_ns > MEET_S * 1e9:
                self._end_half(one, known)
        for one in waiting:
            gang, silent = (one.id, one.fence), gone[one.id]
            run = self._database.read(partial(_waiting, run_id=one.id, fence=one.fence))
            if run is None or run.attempt is None:
                continue
            attempt, known = run.attempt, self._meetings.see(gang, now_ns=now_ns)
            if run.stop is not None or attempt.cause is not None:
                self.call_off(attempt, known, why="", silent=silent)
                continue
            nodes = [crew.node for crew in attempt.crews]
            if silent:
                self.call_off(attempt, known, why=gone_sentence(nodes, silent), silent=silent)
                continue
            heard = {crew.number for crew in attempt.crews if _was_heard(attempt, crew)}
            age_s = (self._clock.wall_ns() - attempt.created_ns) / 1e9
            why = known.overdue(nodes, heard, now_ns=now_ns, age_s=age_s)
            if why:
                self.call_off(attempt, known, why=why)
            else:
                self._decide(attempt, known, now_ns=now_ns)

    def _decide(self, attempt: StoredAttempt, known: RendezvousState, *, now_ns: int, but: int | None = None) -> None:
        """Store the chosen address or call the gang off, after all nodes have reported offers and reaches."""
        quiet_s = self._settings.soft_expiry_s / 2  # Half of the soft expiry covers two heartbeat intervals.
        try:
            came = known.outcome([crew.node for crew in attempt.crews], now_ns=now_ns, quiet_s=quiet_s)
        except ValueError as error:
            _log.error("nodes of attempt %s cannot connect to each other: %s", attempt.gang, error)
            return
        if isinstance(came, Chosen):
            self.choose(attempt, came, but=but)
        elif isinstance(came, Apart):
            self.call_off(attempt, known, why=came.sentence, apart=came.pair)

    def choose(self, attempt: StoredAttempt, chosen: Chosen, *, but: int | None) -> None:
        """Store the rendezvous addresses of an attempt, unless its user code can no longer begin."""
        text = msgspec.json.encode(chosen).decode()

        def work(connection: sa.Connection) -> bool:
            run = _waiting(connection, attempt.run_id, attempt.fence)
            if run is None or run.attempt is None or run.stop is not None or run.attempt.cause is not None:
                return False
            for crew in run.attempt.crews:  # User code begins only if the ranks of every node are starting.
                if crew.ended_ns is not None or crew.halt_json is not None or crew.state is not State.STARTING:
                    return False
            is_new = attempts.decide(connection, run.attempt, chosen_json=text)
            faults.reach("after_choose_before_commit")
            return is_new

        if self._database.write(work):
            faults.reach("after_chosen_before_answer")
            _log.info("rendezvous of attempt %s is complete at %s", attempt.gang, chosen.master[0])
            self._have_look(attempt, but=but)

    def _gone(self, run: ActiveRun, now_ns: int) -> tuple[int, ...]:
        """Return the ranks of the gang's nodes that send neither reports nor heartbeats."""
        silent_ns = self._settings.soft_expiry_s * 1e9
        return tuple(
            crew.id[2]
            for crew in run.crews
            if now_ns - self._leases.last_ns(crew.id, now_ns=now_ns) > silent_ns
            and not self._presence.is_there(crew.node_id, now_ns=now_ns)
        )

    def _end_silent(self, gang: ActiveRun, silent: Sequence[int]) -> None:
        """End a called-off gang on its silent nodes, which send neither reports nor heartbeats."""
        note = Note(at_ns=self._clock.wall_ns())

        def work(connection: sa.Connection) -> tuple[TransitionResult, ...]:
            now = attempts.find(connection, gang.id, gang.fence)
            if now is None or not now.called_off or now.ended_ns is not None:
                return ()
            return tuple(_refuse(connection, crew.id, note) for crew in now.open_crews if crew.number in silent)

        try:
            told = self._database.write(work)
        except (StaleAttempt, IllegalRunTransition) as error:
            _log.info("could not end the silent nodes of attempt %s:%s: %s", gang.id, gang.fence, error)
            return
        for one in told:
            self._announcer.announce(one)

    def _end_half(self, gang: ActiveRun, known: RendezvousState) -> None:
        """End a gang that has started only some nodes, because the restored backup lacks its rendezvous."""

        def work(connection: sa.Connection) -> StoredAttempt | None:
            run = runs.find(connection, gang.id)
            if run is None or run.attempt is None or run.fence != gang.fence or run.state not in ACTIVE:
                return None
            now = run.attempt
            waits = [
                crew.node for crew in now.open_crews if crew.state is State.STARTING and crew.number in known.offers
            ]
            if not waits or now.chosen_json is not None or now.cause is not None or run.stop is not None:
                return None
            detail = f"the restored server lost the rendezvous that these nodes wait for: {', '.join(waits[:3])}"
            cause = Cause(crew=None, reason=Reason.SERVER_RESTORED, detail=detail)
            attempts.change(connection, now, cause_json=msgspec.json.encode(cause).decode())
            return now

        try:
            ended = self._database.write(work)
        except StaleAttempt as error:
            _log.info("could not end attempt %s:%s: %s", gang.id, gang.fence, error)
            return
        if ended is not None:
            _log.warning("attempt %s ends: the server was restored during its rendezvous", ended.gang)
            self._have_look(ended, but=None)

    def call_off(
        self,
        attempt: StoredAttempt,
        known: RendezvousState,
        *,
        why: str,
        apart: tuple[int, int] | None = None,
        silent: Sequence[int] = (),
    ) -> None:
        """Call a gang off, and mark as refused every node of the gang without any report.

        Args:
            attempt: the attempt of the gang.
            known: the rendezvous state of the gang.
            why: reason for users; unused if the attempt ends for another reason.
            apart: the ranks of two nodes; the first node cannot reach the second.
            silent: ranks of the nodes to mark as refused because they have become silent.
        """
        at_ns = self._clock.wall_ns()
        why = "".join(character if character.isprintable() else " " for character in why)

        def work(connection: sa.Connection) -> _Work | None:
            run = _waiting(connection, attempt.run_id, attempt.fence)
            if run is None or run.attempt is None or run.restored_ns is not None:
                return None
            now, values = run.attempt, dict[str, object](called_off=True)
            if now.cause is None and run.stop is None:
                cause = Cause(crew=None, reason=Reason.NODES_APART, detail=why, apart=apart, silent=bool(silent))
                values["cause_json"] = msgspec.json.encode(cause).decode()
            if not attempts.decide(connection, now, **values):
                return None
            unheard = {
                crew.number for crew in now.crews if crew.number not in known.heard_ns and not _was_heard(now, crew)
            }
            ended = [crew for crew in now.open_crews if crew.number in unheard.union(silent)]
            note = Note(at_ns=at_ns, detail=why)
            return now, tuple(_refuse(connection, crew.id, note) for crew in ended)

        try:
            done = self._database.write(work)
        except (StaleAttempt, IllegalRunTransition) as error:
            _log.info("could not call off attempt %s: %s", attempt.gang, error)
            return
        if done is None:
            return
        faults.reach("after_called_off_before_told")
        _log.warning("called off attempt %s before its rendezvous%s", attempt.gang, f": {why}" if why else "")
        for one in done[1]:
            self._announcer.announce(one)
        self._have_look(done[0], but=None)

    def _have_look(self, attempt: StoredAttempt, *, but: int | None) -> None:
        """Request immediate reports from a gang's nodes, because the server's answers contain news."""
        for crew in attempt.open_crews:
            if crew.number != but:
                self._looks.ask(crew.node_id, crew.id)
                self._hub.touch(node_key(crew.node_id))


def has_met(attempt: StoredAttempt) -> bool:
    """Return True if a gang has an address or was called off.

    Running user code proves that the gang had an address. The database of a restored server may lack the address.
    """
    if attempt.chosen_json is not None or attempt.called_off or attempt.began:
        return True
    return any(State.RUNNING in (crew.state, crew.before) for crew in attempt.crews)


def _refuse(connection: sa.Connection, crew: CrewId, note: Note) -> TransitionResult:
    """Mark a node without any report as refused, after the server has called off the node's gang."""
    run_id, _, number = crew
    run = runs.find(connection, run_id)
    assert run is not None
    told = transitions.apply_to_crew(connection, run, number, AttemptEnded(Reason.REFUSED, began=False), note=note)
    transitions.settle(connection, crew, receipt=None, at_ns=note.at_ns)
    return told


def _waiting(connection: sa.Connection, run_id: str, fence: int) -> StoredRun | None:
    """Return the current row of a run whose gang waits for its rendezvous, or None."""
    run = runs.find(connection, run_id)
    if run is None or run.attempt is None or run.fence != fence or run.state not in ACTIVE:
        return None
    return None if run.attempt.ended_ns is not None or has_met(run.attempt) else run


def _was_heard(attempt: StoredAttempt, crew: StoredCrew) -> bool:
    """Return True if the stored rows prove that a node has reported about its attempt."""
    said = crew.halt_json is not None or crew.returned or crew.began or bool(crew.sentence)
    is_starting = State.STARTING in (crew.state, crew.before)
    return said or not is_starting or crew.lease_ns != attempt.created_ns


class RendezvousState(msgspec.Struct, frozen=True, kw_only=True):
    """Rendezvous offers and reaches of one gang.

    Attributes:
        since_ns: time when this process first saw the gang, boottime in nanoseconds.
        offered_ns: arrival of the last offer; None while an offer is missing.
        offers: the first offer of each node, by node rank.
        reaches: the first reach of each node, by node rank.
        heard_ns: time of each node's last report, by node rank.
    """

    since_ns: int
    offered_ns: int | None = None
    offers: Mapping[int, Offer] = msgspec.field(default_factory=dict)
    reaches: Mapping[int, CrewReach] = msgspec.field(default_factory=dict)
    heard_ns: Mapping[int, int] = msgspec.field(default_factory=dict)

    def heard(
        self, number: int, *, of: int, offer: Offer | None, reach: CrewReach | None, now_ns: int
    ) -> RendezvousState:
        """Return the rendezvous state after a node's report.

        The state keeps only the first offer and reach of each node.
        """
        offers = self.offers if offer is None else {number: offer, **self.offers}
        reaches = self.reaches if reach is None else {number: reach, **self.reaches}
        offered_ns = now_ns if self.offered_ns is None and len(offers) == of else self.offered_ns
        heard_ns = {**self.heard_ns, number: now_ns}
        return RendezvousState(
            since_ns=self.since_ns, offered_ns=offered_ns, offers=offers, reaches=reaches, heard_ns=heard_ns
        )

    def offers_for(self, number: int) -> tuple[Offer, ...]:
        """Return all offers of the gang, or nothing before the last offer and after the node's reach report."""
        if self.offered_ns is None or number in self.reaches:
            return ()
        return tuple(self.offers[one] for one in sorted(self.offers))

    def outcome(self, nodes: Sequence[str], *, now_ns: int, quiet_s: float) -> Chosen | Apart | None:
        """Return the gang's chosen connection or its connection failure, or None while a report is missing.

        Args:
            nodes: names of the nodes, by node rank.
            now_ns: boottime, nanoseconds.
            quiet_s: maximum seconds since each node's last report. User code would wait forever for a lost node.
        """
        everybody = range(len(nodes))
        if any(number not in self.offers or number not in self.reaches for number in everybody):
            return None
        if any(now_ns - self.heard_ns.get(number, self.since_ns) > quiet_s * 1e9 for number in everybody):
            return None
        return choose(list(self.offers.values()), list(self.reaches.values()), nodes)

    def overdue(self, nodes: Sequence[str], known: Collection[int], *, now_ns: int, age_s: float) -> str:
        """Return the exceeded rendezvous time limit as a message for users, or "" while the server waits.

        Args:
            nodes: names of the nodes, by node rank.
            known: ranks of the nodes that have reported to this server process or an earlier one.
            now_ns: boottime, nanoseconds.
            age_s: age of the attempt by the wall clock, which limits the wait if the server restarts repeatedly.
        """
        waited_s = (now_ns - self.since_ns) / 1e9
        missing = [number for number in range(len(nodes)) if number not in self.offers]
        unheard = [number for number in missing if number not in known and number not in self.heard_ns]
        if unheard and waited_s > COME_S:
            return f"{_named(nodes, unheard)} not joined the rendezvous"
        if missing and (waited_s > TOTAL_S or (age_s > 3 * TOTAL_S and waited_s > MEET_S)):
            return f"{_named(nodes, missing)} not joined the rendezvous"
        if self.offered_ns is None or now_ns - self.offered_ns <= MEET_S * 1e9:
            return ""
        silent = [number for number in range(len(nodes)) if number not in self.reaches]
        if silent:
            return f"{_named(nodes, silent)} not reported which other nodes are reachable"
        quietest = min(self.heard_ns, key=lambda number: self.heard_ns[number])
        return f"{_named(nodes, [quietest])} stopped reporting during the rendezvous"


class RendezvousStates:
    """Thread-safe store of the rendezvous states of gangs in this server process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gathered: dict[Gang, RendezvousState] = {}

    def hear(
        self, crew: CrewId, *, of: int, offer: Offer | None, reach: CrewReach | None, now_ns: int
    ) -> tuple[RendezvousState, bool]:
        """Store a node's offer or reach.

        Returns:
            The new state, and True if the report completed the offers.
        """
        run_id, fence, number = crew
        with self._lock:
            before = self._gathered.get((run_id, fence)) or RendezvousState(since_ns=now_ns)
            now = before.heard(number, of=of, offer=offer, reach=reach, now_ns=now_ns)
            self._gathered[run_id, fence] = now
            return now, before.offered_ns is None and now.offered_ns is not None

    def see(self, gang: Gang, *, now_ns: int) -> RendezvousState:
        """Return the rendezvous state of a gang. For a new gang, create a rendezvous state that starts now."""
        with self._lock:
            return self._gathered.setdefault(gang, RendezvousState(since_ns=now_ns))

    def find(self, gang: Gang) -> RendezvousState | None:
        """Return the rendezvous state of a gang, or None."""
        with self._lock:
            return self._gathered.get(gang)

    def keep(self, gangs: Collection[Gang]) -> None:
        """Delete the rendezvous states of all gangs except `gangs`."""
        with self._lock:
            self._gathered = {gang: known for gang, known in self._gathered.items() if gang in gangs}


def gone_sentence(nodes: Sequence[str], silent: Sequence[int]) -> str:
    """Return the message to users about the silent nodes of a called-off gang."""
    return f"{_named(nodes, silent)} stopped reporting before the rendezvous"


def _check_offer(gang: str, number: int, offer: Offer) -> None:
    lowest = 1 if number == 0 else 0
    if not 0 < offer.port < 1 << 16 or not lowest <= offer.rendezvous_port < 1 << 16:
        raise InvalidValue(f"node {number} of attempt {gang} offers an invalid port")
    if len(offer.addresses) > ADDRESSES_MAX:
        raise InvalidValue(f"node {number} of attempt {gang} offers more than {ADDRESSES_MAX} addresses")
    if len(offer.saved) > SAVED_MAX or not all(0 < fence < 1 << 31 for fence in offer.saved):
        raise InvalidValue(f"node {number} of attempt {gang} reports checkpoints of invalid attempts")
    if not all(is_interface(one.interface) and _ADDRESS.fullmatch(one.address) for one in offer.addresses):
        raise InvalidValue(f"node {number} of attempt {gang} offers an invalid address")


def _check_reach(gang: str, number: int, reach: CrewReach, *, of: int) -> None:
    if len(reach.tried) > (of - 1) * ADDRESSES_MAX:
        raise InvalidValue(f"node {number} of attempt {gang} has tried more addresses than its gang can have")
    for one in reach.tried:
        if not 0 <= one.crew < of or one.crew == number or _ADDRESS.fullmatch(one.address) is None:
            raise InvalidValue(f"node {number} of attempt {gang} has tried an invalid address")
        if one.microseconds is not None and not 0 <= one.microseconds <= _MICROSECONDS_MAX:
            raise InvalidValue(f"node {number} of attempt {gang} reports an invalid response time")
        if len(one.problem) > PROBLEM_CHARACTERS_MAX:
            raise InvalidValue(
                f"the description of a connection problem may have at most {PROBLEM_CHARACTERS_MAX} characters"
            )


def _named(nodes: Sequence[str], numbers: Sequence[int]) -> str:
    """Return the names of up to three nodes, followed by "has" or "have"."""
    named = ", ".join(nodes[number] for number in numbers[:3])
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"{named}{more} {'has' if len(numbers) == 1 else 'have'}"
