"""What is always true of runs, whatever was killed, lost, doubled, delayed or full: one list, asked everywhere.

    Books (rows of some runs)     ─┐
    History (what people and nodes ├─▶ violations ─▶ [I3 run …: attempts 1 and 2 were on devices at the same time]
        saw, where somebody knows) │
    Moment (what a server thinks) ─┘

Asked of simulated clusters, of servers that were killed at each named place, and of a server at work (`self_check.py`).
Values only: no clock, no database, no log. What needs more than rows takes it as a value, and is not asked without it.

I1  a run whose submit was acknowledged can be read for ever (until retention removes it, which the audit says)
I2  a run has one end, and it is its last event; nothing about it changes any more
I3  attempts of a run come one after the other: no process of one is left when user code of the next begins (its
    devices may still be looked at then); at most the last is open; its orders are for its own node; user code runs
    again only if that was asked for
I4  a device is never lent twice at the same time, from the reservation until it was looked at
I5  states move only along the table; events are numbered without a gap
I6  SUCCEEDED: the result of every rank is stored, whole
I7  the ledger: facts in order, a receipt only at an end, and it charges what its facts say
I8  the audit has one row for each request that changed something, no secret, and its chain is whole
I11 a run that could be placed is placed
I14 a run that waits has a sentence that says for what
I15 what grows has a bound, and keeps it

Not asked: I9, I10 (processes and bytes on a node: its own tests look), I12 (there are no budgets yet), I13 (there are
no schedules yet).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.attempt import MEANINGS, TERMINAL, Reason, State
from serverless_gpu.model.ledger import Fact, FactKind, charge
from serverless_gpu.model.run_lifecycle import FAULT_RETRIES_MAX, INFRA_RETRIES_MAX
from serverless_gpu.model.spec import Function
from serverless_gpu.server.attempts import StoredAttempt
from serverless_gpu.server.audit import Action
from serverless_gpu.server.books import Booked, Books
from serverless_gpu.server.events import StoredEvent, is_remark

UNPLACED_S = 60.0
"""How long a run may wait although it could be placed: a scheduler that is slow is not one that forgot it."""
UNTOLD_S = 60.0
"""How long a run may wait without being told for what."""
LENDINGS_MAX = 50_000
"""How many lendings are held against those of later pages."""
NOT_YET = {"I12": "there are no budgets yet", "I13": "there are no schedules yet"}

_OPEN = frozenset({State.STARTING, State.RUNNING, State.STOPPING, State.UNREACHABLE})
_STOPPED_IN_QUEUE = frozenset({State.CANCELLED, State.TIMED_OUT, State.BUDGET_STOPPED})
MOVES: Mapping[State, frozenset[State]] = {
    # LOST: the server was restored from a backup in which the run waited. FAILED: nothing could ever serve it.
    State.QUEUED: frozenset({State.STARTING, State.LOST, State.FAILED}) | _STOPPED_IN_QUEUE,
    State.STARTING: frozenset({State.RUNNING, State.STOPPING, State.UNREACHABLE, State.QUEUED}) | TERMINAL,
    State.RUNNING: frozenset({State.STOPPING, State.UNREACHABLE, State.QUEUED}) | TERMINAL,
    State.UNREACHABLE: _OPEN | {State.QUEUED} | TERMINAL,
    # A stop that is final replaces one after which the run may go on: the state stays, and that is an event.
    State.STOPPING: frozenset({State.STOPPING, State.UNREACHABLE, State.QUEUED}) | TERMINAL,
    **{state: frozenset() for state in TERMINAL},
}
"""Which state follows which, written down a second time: the table (`run_lifecycle.py`) is not asked about itself."""


class Violation(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Something that is never true, and is.

    Attributes:
        invariant: ``"I3"``.
        subject: what it is about: ``"run <id>"``, ``"device <uuid>"``.
        sentence: what is wrong.
    """

    invariant: str
    subject: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.sentence}"


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """User code of one attempt, as whoever looked at the node saw it, by one clock for all of them.

    Attributes:
        devices: identifiers, unique over all nodes.
        began_ns: the first exec.
        ended_ns: when no process of it was left; None while one is.
        freed_ns: when its devices were given back; None while they are not.
    """

    run_id: str
    fence: int
    node: str
    devices: tuple[str, ...]
    began_ns: int
    ended_ns: int | None = None
    freed_ns: int | None = None


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What people and nodes saw, where somebody kept it.

    Attributes:
        acknowledged: runs whose submit was answered.
        ends: the end that somebody was told of, by run.
        stretches: of user code.
        changed: how many requests about a subject were answered with success and changed something:
            (action, subject) → how many; each has a row in the audit, as have those whose answer was lost.
        secrets: texts that the audit must not have.
    """

    acknowledged: frozenset[str] = frozenset()
    ends: Mapping[str, tuple[State, Reason]] = {}
    stretches: Sequence[Stretch] = ()
    changed: Mapping[tuple[str, str], int] = {}
    secrets: tuple[str, ...] = ()


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What a server at work thinks, beside its database.

    Attributes:
        untold_s: runs that wait and are told nothing, and for how long that has been so, seconds.
        unplaced_s: runs that could be placed now, and for how long that has been so, seconds.
        sizes: what grows, in words → (how much there is, how much there may be).
        missing_parts: digests of results that the store does not have.
    """

    untold_s: Mapping[str, float] = {}
    unplaced_s: Mapping[str, float] = {}
    sizes: Mapping[str, tuple[int, int]] = {}
    missing_parts: frozenset[str] = frozenset()


def violations(books: Books, history: History | None = None, moment: Moment | None = None) -> list[Violation]:
    """Return everything that is wrong.

    Args:
        books: some runs.
        history: of the same runs, or more; None where nobody kept any.
        moment: what the server thinks; None when there is none.
    """
    history, moment = history or History(), moment or Moment()
    found = [violation for booked in books.runs for rule in RULES for violation in rule(booked)]
    for booked in books.runs:
        found += _stored(booked, moment.missing_parts)
        found += _still_ended(booked, history)
    found += [*_readable(books, history), *_lent_once(books), *_audited(books, history)]
    found += [
        *_ran_as_asked(books, history),
        *_one_after_another(history.stretches),
        *_on_devices_alone(history.stretches),
    ]
    found += _of_the_moment(moment)
    return sorted(set(found))


def _bad(booked: Booked, invariant: str, sentence: str) -> Violation:
    return Violation(invariant=invariant, subject=f"run {booked.run.id}", sentence=sentence)


# --- I1 ---------------------------------------------------------------------------------------------------------------


def _readable(books: Books, history: History) -> Iterator[Violation]:
    for run_id, actions in books.absent.items():
        created, expired = actions.get(Action.RUN_CREATE, 0), actions.get(Action.RUN_EXPIRE, 0)
        if (created or run_id in history.acknowledged) and not expired:
            yield Violation(invariant="I1", subject=f"run {run_id}", sentence="was acknowledged, and is not there")


# --- I2, I5 -----------------------------------------------------------------------------------------------------------


def _one_end(booked: Booked) -> Iterator[Violation]:
    run, told = booked.run, booked.events
    ends = [event for event in told if event.state in TERMINAL]
    if len(ends) > 1:
        yield _bad(booked, "I2", f"has {len(ends)} ends: {_listed(event.state for event in ends)}")
    if ends and told[-1] is not ends[-1]:
        yield _bad(booked, "I2", f"event {told[-1].seq} ({told[-1].state}) came after its end")
    if told and told[-1].state is not run.state:
        yield _bad(booked, "I2", f"is {run.state}, and its last event says {told[-1].state}")
    is_over = run.state in TERMINAL
    if is_over != (run.ended_ns is not None) or is_over != (run.reason is not None):
        yield _bad(booked, "I2", f"is {run.state}, with reason {run.reason} and end {run.ended_ns}")
    if run.reason is not None and is_over and MEANINGS[run.reason].state is not run.state:
        yield _bad(booked, "I2", f"is {run.state} because of {run.reason}, which means {MEANINGS[run.reason].state}")


def _still_ended(booked: Booked, history: History) -> Iterator[Violation]:
    end = history.ends.get(booked.run.id)
    if end is not None and end != (booked.run.state, booked.run.reason):
        state, reason = end
        yield _bad(booked, "I2", f"was {state} ({reason}), and is {booked.run.state} ({booked.run.reason})")


def _moves(booked: Booked) -> Iterator[Violation]:
    told = booked.events
    if not told:
        return
    if [event.seq for event in told] != list(range(told[0].seq, told[0].seq + len(told))):
        yield _bad(booked, "I5", f"its events are numbered {_listed(event.seq for event in told)}")
    if told[-1].seq != booked.run.events:
        yield _bad(booked, "I5", f"its last event is {told[-1].seq}, and it is said to have {booked.run.events}")
    for before, event in pairwise(told):
        yield from _move(booked, before, event)


def _move(booked: Booked, before: StoredEvent, event: StoredEvent) -> Iterator[Violation]:
    if event.state not in MOVES[before.state] and not is_remark(before, event):
        yield _bad(booked, "I5", f"went from {before.state} to {event.state} (event {event.seq})")
    places = before.state is State.QUEUED and event.state is State.STARTING
    if event.fence != before.fence + places:
        yield _bad(booked, "I5", f"event {event.seq} ({event.state}) is of attempt {event.fence}, after {before.fence}")


# --- I3 ---------------------------------------------------------------------------------------------------------------


def _attempts_in_order(booked: Booked) -> Iterator[Violation]:
    run, tries = booked.run, booked.attempts
    fences = [attempt.fence for attempt in tries]
    if fences != list(range(1, run.fence + 1)):
        yield _bad(booked, "I3", f"is at attempt {run.fence}, and has attempts {_listed(fences) or 'none'}")
    still_open = [attempt.fence for attempt in tries if attempt.ended_ns is None]
    if still_open != ([run.fence] if run.state in _OPEN else []):
        yield _bad(booked, "I3", f"is {run.state}, and open are its attempts {_listed(still_open) or 'none'}")
    for attempt in tries:
        yield from _attempt(booked, attempt)
    began = sum(attempt.began for attempt in tries)
    again = run.retries_used + run.fault_retries_used
    if not run.spec.resume and began > 1 + again:
        yield _bad(booked, "I3", f"ran user code {began} times, and {again} retries were used")
    faults_max = FAULT_RETRIES_MAX if run.spec.retry_on_infra else 0
    uses = (
        (run.retries_used, run.spec.retries),
        (run.infra_retries_used, INFRA_RETRIES_MAX),
        (run.fault_retries_used, faults_max),
    )
    if any(used > most for used, most in uses):
        used = ", ".join(f"{used} of {most}" for used, most in uses)
        yield _bad(booked, "I3", f"used more retries than it has: {used}")


def _attempt(booked: Booked, attempt: StoredAttempt) -> Iterator[Violation]:
    if (attempt.ended_ns is None) != (attempt.state in _OPEN) or (attempt.ended_ns is None) != (attempt.reason is None):
        yield _bad(booked, "I3", f"attempt {attempt.fence} is {attempt.state}, ended {attempt.ended_ns}")
    if attempt.fence == booked.run.fence and attempt.ended_ns is None and attempt.state is not booked.run.state:
        yield _bad(booked, "I3", f"is {booked.run.state}, and its open attempt is {attempt.state}")
    own = [order for order in booked.orders if order.fence == attempt.fence]
    starts = [order for order in own if order.kind == "start"]
    if len(starts) != 1:
        yield _bad(booked, "I3", f"attempt {attempt.fence} has {len(starts)} orders to start")
    for order in own:
        if order.node_id != attempt.node_id:
            yield _bad(booked, "I3", f"attempt {attempt.fence} is on {attempt.node_id}, order {order.seq} is not")


def _facts_in_order(booked: Booked) -> Iterator[Violation]:
    """Attempts on one boot of one node are compared by its clock."""
    for fence, following in pairwise(sorted(booked.facts)):
        ended = [fact for fact in booked.facts[fence] if fact.kind is not FactKind.FREED]
        began = [fact for fact in booked.facts[following] if fact.kind is FactKind.EXEC]
        if not ended or not began or ended[-1].boot_id != began[0].boot_id:
            continue
        if began[0].boottime_ns < ended[-1].boottime_ns:
            yield _bad(booked, "I3", f"attempt {following} ran user code while {fence} still had processes")


def _one_after_another(stretches: Sequence[Stretch]) -> Iterator[Violation]:
    by_run: dict[str, list[Stretch]] = {}
    for one in stretches:
        by_run.setdefault(one.run_id, []).append(one)
    for run_id, own in by_run.items():
        own.sort(key=lambda one: one.began_ns)
        if len({one.fence for one in own}) < len(own):
            yield Violation(invariant="I3", subject=f"run {run_id}", sentence="one attempt of it ran twice")
        for one, following in pairwise(own):
            if one.ended_ns is None or following.began_ns < one.ended_ns:
                sentence = f"attempts {one.fence} and {following.fence} ran at the same time"
                yield Violation(invariant="I3", subject=f"run {run_id}", sentence=sentence)


def _ran_as_asked(books: Books, history: History) -> Iterator[Violation]:
    """What the node saw, and not what it could tell: an attempt that began although nobody heard so counts, too."""
    ran = Counter(one.run_id for one in history.stretches)
    for booked in books.runs:
        run = booked.run
        again = run.retries_used + run.fault_retries_used
        if not run.spec.resume and ran[run.id] > 1 + again:
            yield _bad(booked, "I3", f"ran user code {ran[run.id]} times, and {again} retries were used")


# --- I4 ---------------------------------------------------------------------------------------------------------------


class _Lent(msgspec.Struct, frozen=True):
    began_ns: int
    ended_ns: int | None
    gang: str


def _lent_once(books: Books) -> Iterator[Violation]:
    lent: dict[tuple[str, ...], list[_Lent]] = {}
    for booked in books.runs:
        for attempt in booked.attempts:
            for place, one in _lendings(attempt, booked.facts.get(attempt.fence, ())):
                lent.setdefault(place, []).append(one)
    for place, ones in lent.items():
        yield from _doubly(place[-1], ones)


def _lendings(attempt: StoredAttempt, own: Sequence[Fact]) -> Iterator[tuple[tuple[str, ...], _Lent]]:
    held = [fact for fact in own if fact.gpus]
    if not held:
        return
    end_ns = held[-1].boottime_ns  # until later facts come, nothing more is known
    for device in {device for fact in held for device in fact.gpus}:
        # What is declared is declared for each home; what the machine has is the machine's.
        place = (held[0].boot_id, "" if device.startswith(("GPU-", "MIG-")) else attempt.node_id, device)
        yield place, _Lent(held[0].boottime_ns, end_ns, attempt.gang)


class Lendings:
    """Who had which device, of all books looked at so far: two runs that had one at once may be pages apart.

    Args:
        most: lendings that are remembered; the oldest are forgotten first.
    """

    def __init__(self, most: int = LENDINGS_MAX) -> None:
        self._most = most
        self._known: dict[tuple[tuple[str, ...], str], _Lent] = {}
        self._of: dict[tuple[str, ...], list[_Lent]] = {}

    def look(self, books: Books) -> list[Violation]:
        """Return which devices of these books were lent twice, among them and together with those before."""
        found: set[Violation] = set()
        for booked in books.runs:
            for attempt in booked.attempts:
                for place, one in _lendings(attempt, booked.facts.get(attempt.fence, ())):
                    found.update(self._put(place, one))
        while len(self._known) > self._most:
            self._take(next(iter(self._known)))
        return sorted(found)

    def _put(self, place: tuple[str, ...], one: _Lent) -> Iterator[Violation]:
        key = (place, one.gang)
        if self._known.get(key) == one:
            return
        if key in self._known:
            self._take(key)
        self._known[key] = one
        ones = self._of.setdefault(place, [])
        at = bisect_right(ones, one.began_ns, key=_began)
        ones.insert(at, one)
        yield from _doubly(place[-1], ones[max(0, at - 1) : at + 2])

    def _take(self, key: tuple[tuple[str, ...], str]) -> None:
        one, ones = self._known.pop(key), self._of[key[0]]
        del ones[ones.index(one, bisect_left(ones, one.began_ns, key=_began))]
        if not ones:
            del self._of[key[0]]


def _began(one: _Lent) -> int:
    return one.began_ns


def _on_devices_alone(stretches: Sequence[Stretch]) -> Iterator[Violation]:
    lent: dict[str, list[_Lent]] = {}
    for one in stretches:
        for device in one.devices:
            lent.setdefault(device, []).append(_Lent(one.began_ns, one.freed_ns, f"{one.run_id}:{one.fence}"))
    for device, ones in lent.items():
        yield from _doubly(device, ones)


def _doubly(device: str, ones: list[_Lent]) -> Iterator[Violation]:
    ones.sort(key=lambda one: one.began_ns)
    for one, following in pairwise(ones):
        if one.ended_ns is None or following.began_ns < one.ended_ns:
            sentence = f"attempts {one.gang} and {following.gang} had it at the same time"
            yield Violation(invariant="I4", subject=f"device {device}", sentence=sentence)


# --- I6, I7 -----------------------------------------------------------------------------------------------------------


def _stored(booked: Booked, missing: frozenset[str]) -> Iterator[Violation]:
    run, attempt = booked.run, booked.run.attempt
    if run.state is not State.SUCCEEDED or attempt is None or not isinstance(run.spec.payload, Function):
        return
    results = booked.results.get(run.fence)
    ranks = run.spec.processes(attempt.world_size)
    there = results.count if results is not None else 0
    if there < ranks:
        yield _bad(booked, "I6", f"has succeeded, and {there} of {ranks} results are there")
    if results is not None and results.cut:
        yield _bad(booked, "I6", f"{results.cut} of its results are not whole")
    gone = missing.intersection(results.parts if results is not None else ())
    if gone:
        yield _bad(booked, "I6", f"{len(gone)} parts of its results are not in the store")


def _ledger(booked: Booked) -> Iterator[Violation]:
    ended = {attempt.fence for attempt in booked.attempts if attempt.ended_ns is not None}
    for fence in sorted(set(booked.receipts) - ended):
        yield _bad(booked, "I7", f"attempt {fence} has a receipt, and has not ended")
    for attempt in booked.attempts:
        own = booked.facts.get(attempt.fence, ())
        for fact, following in pairwise(own):
            if fact.boot_id == following.boot_id and following.boottime_ns < fact.boottime_ns:
                sentence = f"fact {following.seq} of attempt {attempt.fence} is older than fact {fact.seq}"
                yield _bad(booked, "I7", sentence)
        receipt = booked.receipts.get(attempt.fence)
        if receipt is None or receipt.gpu_ms is None or receipt.facts is None or attempt.fence in booked.unread:
            continue  # nothing to compare
        if len(own) < receipt.facts:
            yield _bad(booked, "I7", f"{len(own)} of the {receipt.facts} facts of attempt {attempt.fence} are there")
        elif (charged := _charge_ms(own, attempt.gpu_type)) != receipt.gpu_ms:
            yield _bad(booked, "I7", f"attempt {attempt.fence} is charged {receipt.gpu_ms} ms, facts say {charged}")


def _charge_ms(own: Iterable[Fact], gpu_type: str) -> int | str:
    try:
        return charge(own, gpu_type=gpu_type).gpu_ms
    except InvalidValue as error:
        return error.message


# --- I8 ---------------------------------------------------------------------------------------------------------------


def _created_once(booked: Booked) -> Iterator[Violation]:
    created = booked.actions.get(Action.RUN_CREATE, 0)
    if created != 1:
        yield _bad(booked, "I8", f"the audit says {created} times that it was asked for")
    if booked.run.stop is not None and not booked.actions.get(Action.RUN_STOP, 0):
        yield _bad(booked, "I8", f"was asked to stop ({booked.run.stop}), and the audit does not say by whom")
    if booked.actions.get(Action.RUN_EXPIRE, 0):
        yield _bad(booked, "I8", "the audit says that it was removed, and it is there")


def broken_chain(number: int, sentence: str) -> Violation:
    """Return what it means that the audit is not the chain that was written down (`chain_check.py`)."""
    return Violation(invariant="I8", subject=f"audit entry {number}", sentence=sentence)


def _audited(books: Books, history: History) -> Iterator[Violation]:
    actions = {booked.run.id: booked.actions for booked in books.runs} | dict(books.absent)
    for (action, subject), count in history.changed.items():
        written = actions[subject].get(action, 0) if subject in actions else count
        if written < count:
            sentence = f"{count} requests were answered ({action}), and the audit has {written}"
            yield Violation(invariant="I8", subject=subject, sentence=sentence)
    for secret in history.secrets:
        if any(secret in detail for detail in books.details):
            yield Violation(invariant="I8", subject="audit", sentence="a row of it has a secret")


# --- I11, I14, I15 ----------------------------------------------------------------------------------------------------


def _of_the_moment(moment: Moment) -> Iterator[Violation]:
    for run_id, seconds in moment.unplaced_s.items():
        if seconds > UNPLACED_S:
            sentence = f"waits, though it could have been placed for {seconds:.0f} s"
            yield Violation(invariant="I11", subject=f"run {run_id}", sentence=sentence)
    for run_id, seconds in moment.untold_s.items():
        if seconds > UNTOLD_S:
            sentence = f"waits, and has been told nothing for {seconds:.0f} s"
            yield Violation(invariant="I14", subject=f"run {run_id}", sentence=sentence)
    for what, (size, most) in moment.sizes.items():
        if size > most:
            yield Violation(invariant="I15", subject=what, sentence=f"there are {size}, and {most} are the most")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


RULES: tuple[Callable[[Booked], Iterator[Violation]], ...] = (
    _one_end,
    _moves,
    _attempts_in_order,
    _facts_in_order,
    _ledger,
    _created_once,
)
"""What is asked of each run by itself."""
