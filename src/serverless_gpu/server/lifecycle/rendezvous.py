"""Rendezvous: decides how the crews of a gang meet, and tells them; or calls the gang off.

    a report with an offer ─▶ memory   all are here ─▶ told to each crew until it has said what it reached
    ... with what it reached ─▶ memory   all are here, none has failed, or is silent ─▶ `rendezvous.choose`
         ├─ Chosen ─▶ written, then in every answer to crew 0 until user code begins; once it has, to the others
         └─ Apart, or a limit has passed (`look`) ─▶ called off, written: the cause is that its nodes are apart

User code waits for `chosen`, so this is a fence: `chosen` and `called_off` exclude each other in one statement. Of a
gang that was called off no user code ever begins, which is proof: crews that never reported are ended in the same
transaction, as refused, and should one come after all it is told that it is over. Those that reported end by their own
word, as in any failure.

`RendezvousStates` is memory: crews repeat their offer and what they reached in every report until their user code
begins. So a server that starts knows nothing and is told all of it again, and its limits begin again.

What can go wrong:

- The server dies anywhere: before `chosen` is durable no crew was told of it; after it, every answer has it.
- A crew says something else than before: the first word stays, which the others have tried.
- The run is asked to stop, or a crew fails, before they have met: called off at the next look; that is not the cause.
- A crew is silent when all the rest is there: nothing is chosen until it is heard of, or the limit has passed.
- A crew and its node are silent before they have met: called off, and the crew ended as one that never reported. The
  run need not wait for what never began, nor is this one of the attempts that it may have. The same holds for a crew
  that falls silent once its gang was called off.
- The server was restored from a backup: user code may run of which it knows nothing, so nothing is called off. Where it
  runs on some nodes, and others still wait to be told how they meet, the choice is lost: the gang ends.
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
"""How long a silent crew is waited for."""
MEET_S = 120.0
"""How long crews may take to try each other, once all have said where they can be tried."""
TOTAL_S = 3_600.0
"""How long crews are waited for that are heard of, and fetch their environment, say."""
_ADDRESS = re.compile(r"[0-9A-Za-z:.%_-]{1,64}")
_MICROSECONDS_MAX = 1 << 40


def check_meeting(attempt: StoredAttempt, crew: StoredCrew, said: Report) -> None:
    """Refuse what no crew can have said; the others are told it, and some of it becomes their ranks' variables."""
    if said.offer is None and said.reach is None:
        return
    gang, number = attempt.gang, crew.number
    if attempt.num_nodes == 1:
        raise InvalidValue(f"attempt {gang} is on one node, which has nobody to meet")
    for each in (said.offer, said.reach):
        if each is not None and each.crew != number:
            raise InvalidValue(f"crew {number} of attempt {gang} speaks for crew {each.crew}")
    if said.offer is not None:
        _check_offer(gang, number, said.offer)
    if said.reach is not None:
        _check_reach(gang, number, said.reach, of=attempt.num_nodes)


class RendezvousService:
    """Decides the rendezvous of gangs on several nodes."""

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
        """Note what a crew says about meeting the others, and decide what can be decided by it."""
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
        """Return an answer with what there is for a crew that has not begun; nothing, where it is to end."""
        attempt = run.attempt
        assert attempt is not None
        is_ending = answer.stale or answer.stop is not None or answer.peer_failed or crew.halt_json is not None
        if is_ending or attempt.num_nodes == 1 or crew.began or crew.ended_ns is not None:
            return answer
        if attempt.chosen is not None:
            # Until crew 0 has heard it, its supervisor listens on the port of the rendezvous, and would hang up on
            # ranks. Nodes of a Ray cluster try again then; and its function begins once all have come, so none waits
            # for that.
            is_free = crew.number == 0 or attempt.crews[0].began or run.spec.ray is not None
            return msgspec.structs.replace(answer, chosen=attempt.chosen) if is_free else answer
        known = self._meetings.find((attempt.run_id, attempt.fence))
        if known is None or has_met(attempt):
            return answer
        return msgspec.structs.replace(answer, offers=known.offers_for(crew.number))

    def look(self, active: Sequence[ActiveRun], now_ns: int) -> None:
        """Decide what time decides: a gang that does not meet is called off, and so is one that ends before it has."""
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
        """Write how a gang meets, or that it does not, once its crews have said all that there is to say."""
        quiet_s = self._settings.soft_expiry_s / 2  # two heartbeats, however far apart they are
        try:
            came = known.outcome([crew.node for crew in attempt.crews], now_ns=now_ns, quiet_s=quiet_s)
        except ValueError as error:
            _log.error("crews of attempt %s cannot meet: %s", attempt.gang, error)
            return
        if isinstance(came, Chosen):
            self.choose(attempt, came, but=but)
        elif isinstance(came, Apart):
            self.call_off(attempt, known, why=came.sentence, apart=came.pair)

    def choose(self, attempt: StoredAttempt, chosen: Chosen, *, but: int | None) -> None:
        """Write the addresses over which a gang meets, unless the attempt cannot begin any more."""
        text = msgspec.json.encode(chosen).decode()

        def work(connection: sa.Connection) -> bool:
            run = _waiting(connection, attempt.run_id, attempt.fence)
            if run is None or run.attempt is None or run.stop is not None or run.attempt.cause is not None:
                return False
            for crew in run.attempt.crews:  # user code begins only where every crew was heard of and goes on
                if crew.ended_ns is not None or crew.halt_json is not None or crew.state is not State.STARTING:
                    return False
            is_new = attempts.decide(connection, run.attempt, chosen_json=text)
            faults.reach("after_choose_before_commit")
            return is_new

        if self._database.write(work):
            faults.reach("after_chosen_before_answer")
            _log.info("the nodes of attempt %s have met at %s", attempt.gang, chosen.master[0])
            self._have_look(attempt, but=but)

    def _gone(self, run: ActiveRun, now_ns: int) -> tuple[int, ...]:
        """Return the numbers of the crews that are silent, with their nodes."""
        silent_ns = self._settings.soft_expiry_s * 1e9
        return tuple(
            crew.id[2]
            for crew in run.crews
            if now_ns - self._leases.last_ns(crew.id, now_ns=now_ns) > silent_ns
            and not self._presence.is_there(crew.node_id, now_ns=now_ns)
        )

    def _end_silent(self, gang: ActiveRun, silent: Sequence[int]) -> None:
        """End the silent crews of a gang that was called off, where their nodes are silent, too."""
        note = Note(at_ns=self._clock.wall_ns())

        def work(connection: sa.Connection) -> tuple[TransitionResult, ...]:
            now = attempts.find(connection, gang.id, gang.fence)
            if now is None or not now.called_off or now.ended_ns is not None:
                return ()
            return tuple(_refuse(connection, crew.id, note) for crew in now.open_crews if crew.number in silent)

        try:
            told = self._database.write(work)
        except (StaleAttempt, IllegalRunTransition) as error:
            _log.info("silent crews of %s:%s were not ended: %s", gang.id, gang.fence, error)
            return
        for one in told:
            self._announcer.announce(one)

    def _end_half(self, gang: ActiveRun, known: RendezvousState) -> None:
        """End a gang whose user code runs on some nodes only: their rendezvous is not in the backup."""

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
            detail = f"its nodes had half met, and {', '.join(waits[:3])} cannot be told how"
            cause = Cause(crew=None, reason=Reason.SERVER_RESTORED, detail=detail)
            attempts.change(connection, now, cause_json=msgspec.json.encode(cause).decode())
            return now

        try:
            ended = self._database.write(work)
        except StaleAttempt as error:
            _log.info("%s:%s was not ended: %s", gang.id, gang.fence, error)
            return
        if ended is not None:
            _log.warning("attempt %s ends: the server was restored while its nodes met", ended.gang)
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
        """Write that a gang will not meet, and end the crews that never reported.

        Args:
            attempt: which.
            known: of it.
            why: for people; not asked where it ends for another reason.
            apart: two crews: the first does not reach the second.
            silent: crews that are silent, with their nodes; they are ended, too.
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
            _log.info("attempt %s was not called off: %s", attempt.gang, error)
            return
        if done is None:
            return
        faults.reach("after_called_off_before_told")
        _log.warning("attempt %s was called off before its nodes had met%s", attempt.gang, f": {why}" if why else "")
        for one in done[1]:
            self._announcer.announce(one)
        self._have_look(done[0], but=None)

    def _have_look(self, attempt: StoredAttempt, *, but: int | None) -> None:
        """Have the crews of a gang report now, since there is news for them."""
        for crew in attempt.open_crews:
            if crew.number != but:
                self._looks.ask(crew.node_id, crew.id)
                self._hub.touch(node_key(crew.node_id))


def has_met(attempt: StoredAttempt) -> bool:
    """Return whether it is decided that a gang meets, or that it does not; user code that runs is proof of the first.

    The server may not know that it was decided: it was restored from a backup.
    """
    if attempt.chosen_json is not None or attempt.called_off or attempt.began:
        return True
    return any(State.RUNNING in (crew.state, crew.before) for crew in attempt.crews)


def _refuse(connection: sa.Connection, crew: CrewId, note: Note) -> TransitionResult:
    """End a crew that never reported: its gang was called off, so its user code never begins."""
    run_id, _, number = crew
    run = runs.find(connection, run_id)
    assert run is not None
    told = transitions.apply_to_crew(connection, run, number, AttemptEnded(Reason.REFUSED, began=False), note=note)
    transitions.settle(connection, crew, receipt=None, at_ns=note.at_ns)
    return told


def _waiting(connection: sa.Connection, run_id: str, fence: int) -> StoredRun | None:
    """Return a run whose crews are still to meet, as it is now, or None."""
    run = runs.find(connection, run_id)
    if run is None or run.attempt is None or run.fence != fence or run.state not in ACTIVE:
        return None
    return None if run.attempt.ended_ns is not None or has_met(run.attempt) else run


def _was_heard(attempt: StoredAttempt, crew: StoredCrew) -> bool:
    """Return whether it is written that a crew has reported, to this process or an earlier one."""
    said = crew.halt_json is not None or crew.returned or crew.began or bool(crew.sentence)
    is_starting = State.STARTING in (crew.state, crew.before)
    return said or not is_starting or crew.lease_ns != attempt.created_ns


class RendezvousState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a gang that is to meet.

    Attributes:
        since_ns: when this process saw it first, boottime in nanoseconds.
        offered_ns: when the last of its offers came; None as long as one is missing.
        offers: by crew; the first that each made.
        reaches: likewise.
        heard_ns: when each crew was heard of last.
    """

    since_ns: int
    offered_ns: int | None = None
    offers: Mapping[int, Offer] = msgspec.field(default_factory=dict)
    reaches: Mapping[int, CrewReach] = msgspec.field(default_factory=dict)
    heard_ns: Mapping[int, int] = msgspec.field(default_factory=dict)

    def heard(
        self, number: int, *, of: int, offer: Offer | None, reach: CrewReach | None, now_ns: int
    ) -> RendezvousState:
        """Return what is known after a crew reported; what it said first stays."""
        offers = self.offers if offer is None else {number: offer, **self.offers}
        reaches = self.reaches if reach is None else {number: reach, **self.reaches}
        offered_ns = now_ns if self.offered_ns is None and len(offers) == of else self.offered_ns
        heard_ns = {**self.heard_ns, number: now_ns}
        return RendezvousState(
            since_ns=self.since_ns, offered_ns=offered_ns, offers=offers, reaches=reaches, heard_ns=heard_ns
        )

    def offers_for(self, number: int) -> tuple[Offer, ...]:
        """Return the offers for a crew: all of them, once they are here, and until it has said what it reached."""
        if self.offered_ns is None or number in self.reaches:
            return ()
        return tuple(self.offers[one] for one in sorted(self.offers))

    def outcome(self, nodes: Sequence[str], *, now_ns: int, quiet_s: float) -> Chosen | Apart | None:
        """Return how a gang meets, or why not; None as long as something is missing, or a crew is quiet.

        Args:
            nodes: names of the crews' nodes, by their numbers.
            now_ns: boottime, nanoseconds.
            quiet_s: how long nothing may have been heard of any crew: user code would wait for one that is gone.
        """
        everybody = range(len(nodes))
        if any(number not in self.offers or number not in self.reaches for number in everybody):
            return None
        if any(now_ns - self.heard_ns.get(number, self.since_ns) > quiet_s * 1e9 for number in everybody):
            return None
        return choose(list(self.offers.values()), list(self.reaches.values()), nodes)

    def overdue(self, nodes: Sequence[str], known: Collection[int], *, now_ns: int, age_s: float) -> str:
        """Return why a gang is waited for no longer, for people, or "".

        Args:
            nodes: names of the crews' nodes, by their numbers.
            known: crews that were heard of by whichever process, by their numbers.
            now_ns: boottime, nanoseconds.
            age_s: since it was placed, by the wall clock: servers that are started again and again wait no longer.
        """
        waited_s = (now_ns - self.since_ns) / 1e9
        missing = [number for number in range(len(nodes)) if number not in self.offers]
        unheard = [number for number in missing if number not in known and number not in self.heard_ns]
        if unheard and waited_s > COME_S:
            return f"{_named(nodes, unheard)} not come to the meeting"
        if missing and (waited_s > TOTAL_S or (age_s > 3 * TOTAL_S and waited_s > MEET_S)):
            return f"{_named(nodes, missing)} not come to the meeting"
        if self.offered_ns is None or now_ns - self.offered_ns <= MEET_S * 1e9:
            return ""
        silent = [number for number in range(len(nodes)) if number not in self.reaches]
        if silent:
            return f"{_named(nodes, silent)} not said which nodes can be reached from there"
        quietest = min(self.heard_ns, key=lambda number: self.heard_ns[number])
        return f"{_named(nodes, [quietest])} gone silent while the run's nodes met"


class RendezvousStates:
    """Gangs that are to meet, as this process has heard of them. Any thread may call; it takes the time as a value."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gathered: dict[Gang, RendezvousState] = {}

    def hear(
        self, crew: CrewId, *, of: int, offer: Offer | None, reach: CrewReach | None, now_ns: int
    ) -> tuple[RendezvousState, bool]:
        """Note what a crew said.

        Returns:
            What is known now, and whether the last of the offers came with it.
        """
        run_id, fence, number = crew
        with self._lock:
            before = self._gathered.get((run_id, fence)) or RendezvousState(since_ns=now_ns)
            now = before.heard(number, of=of, offer=offer, reach=reach, now_ns=now_ns)
            self._gathered[run_id, fence] = now
            return now, before.offered_ns is None and now.offered_ns is not None

    def see(self, gang: Gang, *, now_ns: int) -> RendezvousState:
        """Return what is known of a gang; one that was never heard of is waited for from now on."""
        with self._lock:
            return self._gathered.setdefault(gang, RendezvousState(since_ns=now_ns))

    def find(self, gang: Gang) -> RendezvousState | None:
        """Return what is known of a gang, or None."""
        with self._lock:
            return self._gathered.get(gang)

    def keep(self, gangs: Collection[Gang]) -> None:
        """Forget all gangs but these."""
        with self._lock:
            self._gathered = {gang: known for gang, known in self._gathered.items() if gang in gangs}


def gone_sentence(nodes: Sequence[str], silent: Sequence[int]) -> str:
    """Return why a gang is called off whose nodes went silent, for people."""
    return f"{_named(nodes, silent)} gone silent before the run's nodes had met"


def _check_offer(gang: str, number: int, offer: Offer) -> None:
    lowest = 1 if number == 0 else 0
    if not 0 < offer.port < 1 << 16 or not lowest <= offer.rendezvous_port < 1 << 16:
        raise InvalidValue(f"crew {number} of attempt {gang} offers a port that cannot be")
    if len(offer.addresses) > ADDRESSES_MAX:
        raise InvalidValue(f"crew {number} of attempt {gang} offers more than {ADDRESSES_MAX} addresses")
    if len(offer.saved) > SAVED_MAX or not all(0 < fence < 1 << 31 for fence in offer.saved):
        raise InvalidValue(f"crew {number} of attempt {gang} has checkpoints of attempts that cannot be")
    if not all(is_interface(one.interface) and _ADDRESS.fullmatch(one.address) for one in offer.addresses):
        raise InvalidValue(f"crew {number} of attempt {gang} offers an address that cannot be")


def _check_reach(gang: str, number: int, reach: CrewReach, *, of: int) -> None:
    if len(reach.tried) > (of - 1) * ADDRESSES_MAX:
        raise InvalidValue(f"crew {number} of attempt {gang} has tried more addresses than there can be")
    for one in reach.tried:
        if not 0 <= one.crew < of or one.crew == number or _ADDRESS.fullmatch(one.address) is None:
            raise InvalidValue(f"crew {number} of attempt {gang} has tried an address that cannot be")
        if one.microseconds is not None and not 0 <= one.microseconds <= _MICROSECONDS_MAX:
            raise InvalidValue(f"crew {number} of attempt {gang} was answered after a time that cannot be")
        if len(one.problem) > PROBLEM_CHARACTERS_MAX:
            raise InvalidValue(f"a problem has {PROBLEM_CHARACTERS_MAX} characters at most")


def _named(nodes: Sequence[str], numbers: Sequence[int]) -> str:
    """Return which nodes have done something, or not, with the verb."""
    named = ", ".join(nodes[number] for number in numbers[:3])
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"{named}{more} {'has' if len(numbers) == 1 else 'have'}"
