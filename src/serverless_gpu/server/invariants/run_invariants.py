"""Defines run invariants, which hold even after crashes, lost messages and full disks.

    RecordedRuns (rows of some runs)   ─┐
    History (observations of clients    ├─▶ violations ─▶ [I3 run …: attempts 1 and 2 were on devices at the same time]
        and nodes, if a test has them)  │
    LiveState (memory of a server)     ─┘

Tests check these invariants in simulated clusters and after injected server crashes. A running server checks its own
database (`self_check.py`). All checks are pure functions. Some invariants need observations besides database rows, so
callers can pass a `History` and a `LiveState`. A `Crew` contains the ranks of an attempt on one node.

    I1  Clients can read an acknowledged run until retention removes it. The audit records the removal.
    I2  A run ends once. The end is the run's last event and never changes.
    I3  Attempts of a run do not overlap. No process of an attempt remains when user code of the next attempt begins,
        but the node may still check its devices. Only the last attempt may be open. User code runs again only for
        a retry.
        crews      An attempt has one `Crew` per node. Numbers and ranks are consecutive, and the devices add up.
        ended      An attempt has ended when it has ended on every node. A newer attempt starts only after that, and
                   on no node that may have a process of an older attempt.
        written    The state of an unended run on several nodes follows from the states on its nodes.
        met        User code on several nodes begins only after the rendezvous, and never in a cancelled gang.
        released   All ranks have returned. After that, only a node whose results are missing can change the end.
        reason     The failure of a peer is never the reason of a whole run.
    I4  A device belongs to one attempt at a time, from its reservation until its check.
    I5  States change only as `MOVES` permits. The numbers of events have no gap.
    I6  SUCCEEDED: the complete result of every rank is stored.
    I7  Facts are in order, and a receipt exists only at an end. Charges follow from facts and tariff, and equal the
        receipt. Charges never change; the server only reverses and posts them again.
    I8  The audit has one row for each request that changed something. The audit contains no secret, and its chain is
        intact.
    I11 A run that can be placed is placed.
    I12 The server asks a run to stop when its hard budget is used up, which bounds the overspend
        (`model/billing/budget.py`).
    I14 Every waiting run has a reason.
    I15 Every growing table in memory has a bound and stays within the bound.

Tests of the node check the invariants I9 and I10. Invariant I13 is reserved for schedules, which do not exist yet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing import metering
from serverless_gpu.model.billing.ledger import EntryKind, LedgerLine, charge, reversed_line, standing, sum_of
from serverless_gpu.model.lifecycle.attempt import ACTIVE, MEANINGS, TERMINAL, Fact, FactKind, Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import FAULT_RETRIES_MAX, INFRA_RETRIES_MAX
from serverless_gpu.model.spec import Function
from serverless_gpu.server.invariants.invariant_inputs import (
    OfCrew,
    RecordedOrder,
    RecordedRun,
    RecordedRuns,
    SeenReceipt,
    Violation,
    violation_of,
)
from serverless_gpu.server.lifecycle.gangs import is_folded
from serverless_gpu.server.lifecycle.metering import used
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.charges import PostedEntry
from serverless_gpu.server.records.crews import StoredCrew
from serverless_gpu.server.records.events import StoredEvent, is_remark

LENDINGS_MAX = 50_000
"""Maximum number of remembered device assignments."""
Place = tuple[str, ...]
UNPLACED_S = 60.0
"""Seconds after which the self-check reports a waiting run that could start."""
UNTOLD_S = 60.0
"""Seconds after which the self-check reports a run that waits without a reason."""
UNSTOPPED_S = 30.0
"""Seconds after which the self-check reports a run whose hard budget is used up. Budgets reserve twice this time."""
_OPEN = frozenset({State.STARTING, State.RUNNING, State.STOPPING, State.UNREACHABLE})
_STOPPED_IN_QUEUE = frozenset({State.CANCELLED, State.TIMED_OUT, State.BUDGET_STOPPED})
MOVES: Mapping[State, frozenset[State]] = {
    # An operator who restores a backup can lose waiting runs. A run fails if no node can execute the run.
    State.QUEUED: frozenset({State.STARTING, State.LOST, State.FAILED}) | _STOPPED_IN_QUEUE,
    State.STARTING: frozenset({State.RUNNING, State.STOPPING, State.UNREACHABLE, State.QUEUED}) | TERMINAL,
    State.RUNNING: frozenset({State.STOPPING, State.UNREACHABLE, State.QUEUED}) | TERMINAL,
    State.UNREACHABLE: _OPEN | {State.QUEUED} | TERMINAL,
    # A final stop request may replace a preemption, with an event but without a state change.
    State.STOPPING: frozenset({State.STOPPING, State.UNREACHABLE, State.QUEUED}) | TERMINAL,
    **{state: frozenset() for state in TERMINAL},
}
"""Allowed state changes, defined independently of the transition table in `run_lifecycle.py`."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Observed execution of an attempt's user code on one node. All nodes share one clock."""

    run_id: str
    fence: int
    node: str
    devices: tuple[str, ...]  # Globally unique device identifiers.
    began_ns: int  # Time of the first exec system call.
    ended_ns: int | None = None  # Time at which the last process ended; None while a process remains.
    freed_ns: int | None = None  # Time at which the node released the devices; None before the release.
    crew: int = 0  # Number of the node within the attempt.


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of clients and nodes in a test."""

    acknowledged: frozenset[str] = frozenset()  # Runs that the server acknowledged.
    ends: Mapping[str, tuple[State, Reason]] = {}  # Final states that clients observed, by run.
    stretches: Sequence[Stretch] = ()  # Observed executions of user code.
    changed: Mapping[tuple[str, str], int] = {}
    """Number of successful changing requests, by (action, subject).

    The audit may contain more entries, because clients can lose responses to successful requests.
    """
    secrets: tuple[str, ...] = ()  # Secrets that the audit must not contain.


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """In-memory state of a running server."""

    untold_s: Mapping[str, float] = {}
    """Seconds since each waiting run has had no reason, by run."""
    unplaced_s: Mapping[str, float] = {}  # Seconds since each waiting run could start, by run.
    unstopped_s: Mapping[str, float] = {}
    """Seconds since each run's hard budget was used up without a stop request, by run."""
    sizes: Mapping[str, tuple[int, int]] = {}  # Current and maximum size of in-memory tables, by description.
    missing_parts: frozenset[str] = frozenset()  # Digests of missing result parts.


def violations(page: RecordedRuns, history: History | None = None, moment: LiveState | None = None) -> list[Violation]:
    """Return all violations in a page of runs, sorted."""
    history, moment = history or History(), moment or LiveState()
    found = [violation for recorded in page.runs for rule in RULES for violation in rule(recorded)]
    for recorded in page.runs:
        found += _stored(recorded, moment.missing_parts)
        found += _still_ended(recorded, history)
    found += [*_readable(page, history), *lent_once(page), *_audited(page, history)]
    found += [
        *_ran_as_asked(page, history),
        *_one_after_another(history.stretches),
        *_on_devices_alone(history.stretches),
    ]
    found += _of_the_moment(moment)
    return sorted(set(found))


# --- I1 ---------------------------------------------------------------------------------------------------------------


def _readable(page: RecordedRuns, history: History) -> Iterator[Violation]:
    for run_id, actions in page.absent.items():
        created, expired = actions.get(Action.RUN_CREATE, 0), actions.get(Action.RUN_EXPIRE, 0)
        if (created or run_id in history.acknowledged) and not expired:
            yield Violation(
                invariant="I1",
                subject=f"run {run_id}",
                sentence="the server acknowledged the run, but the run does not exist",
            )


# --- I2, I5 -----------------------------------------------------------------------------------------------------------


def _one_end(recorded: RecordedRun) -> Iterator[Violation]:
    run, told = recorded.run, recorded.events
    ends = [event for event in told if event.state in TERMINAL]
    if len(ends) > 1:
        yield violation_of(recorded, "I2", f"the run has {len(ends)} ends: {_listed(event.state for event in ends)}")
    if ends and told[-1] is not ends[-1]:
        yield violation_of(recorded, "I2", f"event {told[-1].seq} ({told[-1].state}) follows the end of the run")
    if told and told[-1].state is not run.state:
        yield violation_of(recorded, "I2", f"the run is {run.state}, but its last event has the state {told[-1].state}")
    is_over = run.state in TERMINAL
    if is_over != (run.ended_ns is not None) or is_over != (run.reason is not None):
        yield violation_of(recorded, "I2", f"the run is {run.state}, with reason {run.reason} and end {run.ended_ns}")
    if run.reason is not None and is_over and MEANINGS[run.reason].state is not run.state:
        yield violation_of(
            recorded, "I2", f"the run is {run.state}, but its reason {run.reason} means {MEANINGS[run.reason].state}"
        )


def _still_ended(recorded: RecordedRun, history: History) -> Iterator[Violation]:
    end = history.ends.get(recorded.run.id)
    if end is not None and end != (recorded.run.state, recorded.run.reason):
        state, reason = end
        yield violation_of(
            recorded, "I2", f"the run was {state} ({reason}) and is now {recorded.run.state} ({recorded.run.reason})"
        )


def _moves(recorded: RecordedRun) -> Iterator[Violation]:
    told = recorded.events
    if not told:
        return
    if [event.seq for event in told] != list(range(told[0].seq, told[0].seq + len(told))):
        yield violation_of(recorded, "I5", f"the run's events are numbered {_listed(event.seq for event in told)}")
    if told[-1].seq != recorded.run.events:
        yield violation_of(
            recorded, "I5", f"the run's last event is {told[-1].seq}, but the run counts {recorded.run.events} events"
        )
    for before, event in pairwise(told):
        yield from _move(recorded, before, event)


def _move(recorded: RecordedRun, before: StoredEvent, event: StoredEvent) -> Iterator[Violation]:
    if event.state not in MOVES[before.state] and not is_remark(before, event):
        yield violation_of(recorded, "I5", f"the run went from {before.state} to {event.state} (event {event.seq})")
    places = before.state is State.QUEUED and event.state is State.STARTING
    if event.fence != before.fence + places:
        yield violation_of(
            recorded,
            "I5",
            f"event {event.seq} ({event.state}) belongs to attempt {event.fence} but follows attempt {before.fence}",
        )


# --- I3 ---------------------------------------------------------------------------------------------------------------


def _attempts_in_order(recorded: RecordedRun) -> Iterator[Violation]:
    run, tries = recorded.run, recorded.attempts
    fences = [attempt.fence for attempt in tries]
    if fences != list(range(1, run.fence + 1)):
        yield violation_of(
            recorded, "I3", f"the run is at attempt {run.fence} but has attempts {_listed(fences) or 'none'}"
        )
    still_open = [attempt.fence for attempt in tries if attempt.ended_ns is None]
    if still_open != ([run.fence] if run.state in _OPEN else []):
        yield violation_of(
            recorded, "I3", f"the run is {run.state}, but its open attempts are {_listed(still_open) or 'none'}"
        )
    for attempt in tries:
        yield from _attempt(recorded, attempt)
    began = sum(attempt.began for attempt in tries)
    again = run.retries_used + run.fault_retries_used
    if not run.spec.resume and began > 1 + again:
        yield violation_of(recorded, "I3", f"the run executed user code {began} times with only {again} retries")
    faults_max = FAULT_RETRIES_MAX if run.spec.retry_on_infra else 0
    uses = (
        (run.retries_used, run.spec.retries),
        (run.infra_retries_used, INFRA_RETRIES_MAX),
        (run.fault_retries_used, faults_max),
    )
    if any(used > most for used, most in uses):
        used = ", ".join(f"{used} of {most}" for used, most in uses)
        yield violation_of(recorded, "I3", f"the run used more retries than allowed: {used}")


def _attempt(recorded: RecordedRun, attempt: StoredAttempt) -> Iterator[Violation]:
    if (attempt.ended_ns is None) != (attempt.state in _OPEN) or (attempt.ended_ns is None) != (attempt.reason is None):
        yield violation_of(recorded, "I3", f"attempt {attempt.fence} is {attempt.state}, ended {attempt.ended_ns}")
    if attempt.fence == recorded.run.fence and attempt.ended_ns is None and attempt.state is not recorded.run.state:
        yield violation_of(recorded, "I3", f"the run is {recorded.run.state}, but its open attempt is {attempt.state}")
    own = [order for order in recorded.orders if order.fence == attempt.fence]
    for crew in attempt.crews:
        yield from _crew(recorded, crew, [order for order in own if order.crew == crew.number])


def _crew(recorded: RecordedRun, crew: StoredCrew, own: Sequence[RecordedOrder]) -> Iterator[Violation]:
    name = f"attempt {crew.fence}{f' (node {crew.number})' if crew.number else ''}"
    if (crew.ended_ns is None) != (crew.state in _OPEN) or (crew.ended_ns is None) != (crew.reason is None):
        yield violation_of(recorded, "I3", f"{name} is {crew.state} on {crew.node_id}, ended {crew.ended_ns}")
    starts = [order for order in own if order.kind == "start"]
    if len(starts) != 1:
        yield violation_of(recorded, "I3", f"{name} has {len(starts)} start orders instead of one")
    for order in own:
        if order.node_id != crew.node_id:
            yield violation_of(
                recorded, "I3", f"{name} is on node {crew.node_id}, but order {order.seq} names another node"
            )


def _facts_in_order(recorded: RecordedRun) -> Iterator[Violation]:
    """Yield overlaps between successive attempts on the same node boot."""
    for fence, following in pairwise(sorted({fence for fence, _ in recorded.facts})):
        before = [facts for (other, _), facts in recorded.facts.items() if other == fence]
        after = [facts for (other, _), facts in recorded.facts.items() if other == following]
        for own, others in product(before, after):
            ended = [fact for fact in own if fact.kind is not FactKind.FREED]
            began = [fact for fact in others if fact.kind is FactKind.EXEC]
            if not ended or not began or ended[-1].boot_id != began[0].boot_id:
                continue
            if began[0].boottime_ns < ended[-1].boottime_ns:
                yield violation_of(
                    recorded, "I3", f"attempt {following} ran user code while attempt {fence} still had processes"
                )


def _one_after_another(stretches: Sequence[Stretch]) -> Iterator[Violation]:
    by_run: dict[str, list[Stretch]] = {}
    for one in stretches:
        by_run.setdefault(one.run_id, []).append(one)
    for run_id, own in by_run.items():
        own.sort(key=lambda one: (one.fence, one.began_ns))
        if len({(one.fence, one.crew) for one in own}) < len(own):
            yield Violation(
                invariant="I3", subject=f"run {run_id}", sentence="the run executed one of its attempts twice"
            )
        for one, following in _pairs_of_attempts(own):
            if one.ended_ns is None or following.began_ns < one.ended_ns:
                sentence = f"attempts {one.fence} and {following.fence} ran at the same time"
                yield Violation(invariant="I3", subject=f"run {run_id}", sentence=sentence)


def _pairs_of_attempts(own: Sequence[Stretch]) -> Iterator[tuple[Stretch, Stretch]]:
    """Yield each pair of executions of two successive attempts."""
    fences = sorted({one.fence for one in own})
    for fence, following in pairwise(fences):
        yield from product((one for one in own if one.fence == fence), (one for one in own if one.fence == following))


def _ran_as_asked(page: RecordedRuns, history: History) -> Iterator[Violation]:
    """Yield violations in observed executions, because reports may be missing."""
    attempts = {(one.run_id, one.fence) for one in history.stretches}
    ran = Counter(run_id for run_id, _ in attempts)
    for recorded in page.runs:
        run = recorded.run
        for attempt in recorded.attempts:
            if attempt.called_off and (run.id, attempt.fence) in attempts:
                yield violation_of(recorded, "I3", f"attempt {attempt.fence} was cancelled, but its user code ran")
        again = run.retries_used + run.fault_retries_used
        if not run.spec.resume and ran[run.id] > 1 + again:
            yield violation_of(
                recorded, "I3", f"the run executed user code {ran[run.id]} times with only {again} retries"
            )


# --- I4 ---------------------------------------------------------------------------------------------------------------


def _on_devices_alone(stretches: Sequence[Stretch]) -> Iterator[Violation]:
    lent: dict[str, list[LentDevice]] = {}
    for one in stretches:
        for device in one.devices:
            gang = crew_name(f"{one.run_id}:{one.fence}", one.crew)
            lent.setdefault(device, []).append(LentDevice(one.began_ns, one.freed_ns, gang))
    for device, ones in lent.items():
        yield from double_lendings(device, ones)


# --- I6 ---------------------------------------------------------------------------------------------------------------


def _stored(recorded: RecordedRun, missing: frozenset[str]) -> Iterator[Violation]:
    run, attempt = recorded.run, recorded.run.attempt
    if run.state is not State.SUCCEEDED or attempt is None or not isinstance(run.spec.payload, Function):
        return
    results = recorded.results.get(run.fence)
    ranks = attempt.num_nodes if run.spec.per_node else attempt.world_size
    there = results.count if results is not None else 0
    if there < ranks:
        yield violation_of(recorded, "I6", f"the run has succeeded, but only {there} of {ranks} results exist")
    if results is not None and results.cut:
        yield violation_of(recorded, "I6", f"{results.cut} results of the run are incomplete")
    gone = missing.intersection(results.parts if results is not None else ())
    if gone:
        yield violation_of(recorded, "I6", f"{len(gone)} result parts of the run are missing in the store")


# --- I7 ---------------------------------------------------------------------------------------------------------------


def ledger(recorded: RecordedRun) -> Iterator[Violation]:
    """Yield violations in a run's facts, receipts and ledger entries."""
    all_crews = [_OfCrew(attempt=attempt, crew=crew) for attempt in recorded.attempts for crew in attempt.crews]
    ended = {one.key for one in all_crews if one.crew.ended_ns is not None}
    for fence, _ in sorted(set(recorded.receipts) - ended):
        yield violation_of(recorded, "I7", f"attempt {fence} has a receipt but has not ended")
    for one in all_crews:
        own = recorded.facts.get(one.key, ())
        for fact, following in pairwise(own):
            if fact.boot_id == following.boot_id and following.boottime_ns < fact.boottime_ns:
                sentence = f"fact {following.seq} of {one.name} is older than fact {fact.seq}"
                yield violation_of(recorded, "I7", sentence)
        posted = recorded.charges.get(one.key, ())
        for sentence in _entries(posted):
            yield violation_of(recorded, "I7", f"{one.name}: {sentence}")
        if one.key in recorded.unread:
            continue  # Skip comparisons that need the omitted facts.
        for sentence in (*_receipt(one, own, recorded), *_charged(one, own, posted, recorded)):
            yield violation_of(recorded, "I7", sentence)


class _OfCrew(msgspec.Struct, frozen=True, kw_only=True):
    """A `Crew` with its attempt."""

    attempt: StoredAttempt
    crew: StoredCrew

    @property
    def key(self) -> OfCrew:
        return self.crew.fence, self.crew.number

    @property
    def name(self) -> str:
        number = self.crew.number
        return f"attempt {self.crew.fence}{f' (node {number})' if number else ''}"


def _receipt(one: _OfCrew, own: Sequence[Fact], recorded: RecordedRun) -> Iterator[str]:
    receipt = recorded.receipts.get(one.key)
    if receipt is None or receipt.gpu_ms is None or receipt.facts is None:
        return
    if len(own) < receipt.facts:
        yield f"only {len(own)} of the {receipt.facts} facts of {one.name} exist"
    elif (charged := _charge_ms(own, one.attempt.gpu_type)) != receipt.gpu_ms:
        yield f"the receipt of {one.name} charges {receipt.gpu_ms} ms, but its facts amount to {charged}"


def _charge_ms(own: Iterable[Fact], gpu_type: str) -> int | str:
    try:
        return charge(own, gpu_type=gpu_type).gpu_ms
    except InvalidValue as error:
        return error.message


def _entries(posted: Sequence[PostedEntry]) -> Iterator[str]:
    """Yield contradictions among ledger entries."""
    if [one.entry.number for one in posted] != list(range(1, len(posted) + 1)):
        yield f"the ledger entries are numbered {', '.join(str(one.entry.number) for one in posted)}"
    if len({one.account_id for one in posted}) > 1:
        yield "the ledger entries belong to more than one account"
    there: dict[int, PostedEntry] = {}
    for one in posted:
        entry = one.entry
        before = there.pop(entry.line.day, None)
        if entry.kind is EntryKind.REVERSAL:
            if before is None:
                yield f"ledger entry {entry.number} reverses an entry that does not exist"
            elif not _takes_back(one, before):
                yield f"ledger entry {entry.number} does not exactly reverse entry {before.entry.number}"
            continue
        if before is not None:
            yield f"ledger entries {before.entry.number} and {entry.number} both belong to day {entry.line.day}"
        there[entry.line.day] = one


def _takes_back(one: PostedEntry, before: PostedEntry) -> bool:
    is_same = one.entry.provisional == before.entry.provisional and one.queued_ms == -before.queued_ms
    return is_same and one.entry.line == reversed_line(before.entry.line)


def _charged(of: _OfCrew, own: Sequence[Fact], posted: Sequence[PostedEntry], recorded: RecordedRun) -> Iterator[str]:
    """Yield differences between ledger charges and the charges computed from facts."""
    if of.crew.settled_ns is None or of.crew.uncharged:
        return
    try:
        wanted = used(of.attempt, of.crew, own)
    except InvalidValue as error:
        yield f"{of.name} cannot be charged: {error.message}"
        return
    stands = standing(one.entry for one in posted).values()
    if [entry.line for entry in stands] != list(wanted):
        yield f"the ledger charges {of.name} {_told(entry.line for entry in stands)} instead of {_told(wanted)}"
        return
    receipt = recorded.receipts.get(of.key)
    is_whole = receipt is not None and receipt.facts is not None and len(own) >= receipt.facts
    if (is_whole or (own[-1:] and own[-1].kind is FactKind.FREED)) and any(entry.provisional for entry in stands):
        yield f"{of.name} has reported all facts, but its charges are still provisional"
    if receipt is not None and is_whole and _is_alike(of, receipt):
        micros = sum_of(wanted, of.attempt.tariff).micros
        if micros != receipt.micros:
            yield f"the receipt of {of.name} contains {receipt.micros} micros, but the ledger contains {micros}"


def _is_alike(of: _OfCrew, receipt: SeenReceipt) -> bool:
    """Return True if a receipt is comparable with the ledger.

    The node must know the tariff and the same end reason as the server. The end reasons differ if the server abandoned
    the attempt before its end. A node also does not know the end reasons of other nodes, which decide about the
    charges.
    """
    own, whole = of.crew.reason, of.attempt.reason
    if own is None or whole is None or MEANINGS[own].is_billed is not MEANINGS[whole].is_billed:
        return False
    reason = None if own is Reason.COMPLETED else own.value
    return receipt.bill is not msgspec.UNSET and receipt.reason == reason


def _told(lines: Iterable[LedgerLine]) -> str:
    """Format ledger lines as a short text."""
    return ", ".join(f"{line.gpu_ms} ms ({line.micros} micros) on day {line.day}" for line in lines) or "nothing"


# --- I8 ---------------------------------------------------------------------------------------------------------------


def _created_once(recorded: RecordedRun) -> Iterator[Violation]:
    created = recorded.actions.get(Action.RUN_CREATE, 0)
    if created != 1:
        yield violation_of(recorded, "I8", f"the audit contains {created} creation entries for the run")
    if recorded.run.stop is not None and not recorded.actions.get(Action.RUN_STOP, 0):
        yield violation_of(
            recorded, "I8", f"the run has a stop request ({recorded.run.stop}), but the audit names no caller"
        )
    if recorded.actions.get(Action.RUN_EXPIRE, 0):
        yield violation_of(recorded, "I8", "the audit records the removal of the run, but the run still exists")


def broken_chain(number: int, sentence: str) -> Violation:
    """Return the violation for an audit chain error of `ChainCheck`."""
    return Violation(invariant="I8", subject=f"audit entry {number}", sentence=sentence)


def _audited(page: RecordedRuns, history: History) -> Iterator[Violation]:
    actions = {recorded.run.id: recorded.actions for recorded in page.runs} | dict(page.absent)
    for (action, subject), count in history.changed.items():
        written = actions[subject].get(action, 0) if subject in actions else count
        if written < count:
            sentence = f"{count} requests succeeded ({action}), but the audit contains only {written}"
            yield Violation(invariant="I8", subject=subject, sentence=sentence)
    for secret in history.secrets:
        if any(secret in detail for detail in page.details):
            yield Violation(invariant="I8", subject="audit", sentence="an audit entry contains a secret")


# --- I11, I12, I14, I15 -----------------------------------------------------------------------------------------------


def _of_the_moment(moment: LiveState) -> Iterator[Violation]:
    for run_id, seconds in moment.unplaced_s.items():
        if seconds > UNPLACED_S:
            sentence = f"the run still waits, although it could start {seconds:.0f} s ago"
            yield Violation(invariant="I11", subject=f"run {run_id}", sentence=sentence)
    for run_id, seconds in moment.unstopped_s.items():
        if seconds > UNSTOPPED_S:
            sentence = f"the server has not stopped the run, although its hard budget was used up {seconds:.0f} s ago"
            yield Violation(invariant="I12", subject=f"run {run_id}", sentence=sentence)
    for run_id, seconds in moment.untold_s.items():
        if seconds > UNTOLD_S:
            sentence = f"the run has waited without a reason for {seconds:.0f} s"
            yield Violation(invariant="I14", subject=f"run {run_id}", sentence=sentence)
    for what, (size, most) in moment.sizes.items():
        if size > most:
            yield Violation(
                invariant="I15",
                subject=what,
                sentence=f"the table has {size} entries and exceeds its maximum of {most}",
            )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


# --- I4, of facts -----------------------------------------------------------------------------------------------------


class LentDevice(msgspec.Struct, frozen=True):
    began_ns: int
    ended_ns: int | None
    gang: str


def lent_once(page: RecordedRuns) -> Iterator[Violation]:
    lent: dict[Place, list[LentDevice]] = {}
    for recorded in page.runs:
        for attempt in recorded.attempts:
            for crew in attempt.crews:
                own = recorded.facts.get((crew.fence, crew.number), ())
                for place, one in lent_devices(crew_name(attempt.gang, crew.number), crew.node_id, own):
                    lent.setdefault(place, []).append(one)
    for place, ones in lent.items():
        yield from double_lendings(place[-1], ones)


def crew_name(gang: str, number: int) -> str:
    """Return the display name of a gang on one node."""
    return f"{gang} (node {number})" if number else gang


def lent_devices(gang: str, node_id: str, own: Sequence[Fact]) -> Iterator[tuple[Place, LentDevice]]:
    """Yield the devices of a gang on one node, with the charged start and end times."""
    for one in metering.lendings(own):
        for device in one.gpus:
            # UUIDs of GPUs identify devices per machine. Other device names are unique only per node.
            place = (one.boot_id, "" if device.startswith(("GPU-", "MIG-")) else node_id, device)
            yield place, LentDevice(one.start_ns, one.end_ns, gang)


class Lendings:
    """Remembers device assignments across pages to detect double assignments."""

    def __init__(self, most: int = LENDINGS_MAX) -> None:
        self._most = most
        self._known: dict[tuple[Place, str, int], LentDevice] = {}
        self._of: dict[Place, list[LentDevice]] = {}

    def look(self, page: RecordedRuns) -> list[Violation]:
        """Return double device assignments within this page and with remembered pages."""
        found: set[Violation] = set()
        for recorded in page.runs:
            for attempt in recorded.attempts:
                for crew in attempt.crews:
                    own = recorded.facts.get((crew.fence, crew.number), ())
                    for place, one in lent_devices(crew_name(attempt.gang, crew.number), crew.node_id, own):
                        found.update(self._put(place, one))
        while len(self._known) > self._most:
            self._take(next(iter(self._known)))
        return sorted(found)

    def _put(self, place: Place, one: LentDevice) -> Iterator[Violation]:
        key = (place, one.gang, one.began_ns)
        if self._known.get(key) == one:
            return
        if key in self._known:
            self._take(key)
        self._known[key] = one
        ones = self._of.setdefault(place, [])
        at = bisect_right(ones, one.began_ns, key=_began)
        ones.insert(at, one)
        yield from double_lendings(place[-1], ones[max(0, at - 1) : at + 2])

    def _take(self, key: tuple[Place, str, int]) -> None:
        one, ones = self._known.pop(key), self._of[key[0]]
        del ones[ones.index(one, bisect_left(ones, one.began_ns, key=_began))]
        if not ones:
            del self._of[key[0]]


def _began(one: LentDevice) -> int:
    return one.began_ns


def double_lendings(device: str, ones: list[LentDevice]) -> Iterator[Violation]:
    ones.sort(key=_began)
    latest = ones[0]
    for one in ones[1:]:
        if latest.ended_ns is None or one.began_ns < latest.ended_ns:
            sentence = f"attempts {latest.gang} and {one.gang} had the device at the same time"
            yield Violation(invariant="I4", subject=f"device {device}", sentence=sentence)
        if latest.ended_ns is not None and (one.ended_ns is None or one.ended_ns > latest.ended_ns):
            latest = one


# --- I3, of gangs -----------------------------------------------------------------------------------------------------


def gangs(recorded: RecordedRun) -> Iterator[Violation]:
    """Yield violations in a run's gangs on several nodes."""
    for attempt in recorded.attempts:
        for sentence in (*_laid_out(attempt), *_amounting(attempt), *_met(attempt, recorded), *_released(attempt)):
            yield violation_of(recorded, "I3", f"attempt {attempt.fence}: {sentence}")
    for attempt in recorded.attempts:
        left = [crew for crew in attempt.crews if not crew.proven]
        if left and attempt.fence < recorded.run.fence:
            sentence = f"attempt {attempt.fence} may have left a process on {left[0].node}, but a later attempt exists"
            yield violation_of(recorded, "I3", sentence)
    run = recorded.run
    if run.attempt is not None and run.attempt.num_nodes > 1 and run.state in ACTIVE and not is_folded(run):
        yield violation_of(
            recorded, "I3", f"the state {run.state} of attempt {run.fence} does not follow from the states on its nodes"
        )
    if run.reason is Reason.PEER_FAILED:
        yield violation_of(
            recorded, "I3", "the run ended because of a failed peer, which is not a valid reason for a run"
        )


def _laid_out(attempt: StoredAttempt) -> Iterator[str]:
    crews = attempt.crews
    if len(crews) != attempt.num_nodes or sum(crew.gpus for crew in crews) != attempt.world_size:
        devices = sum(crew.gpus for crew in crews)
        yield f"the gang has {len(crews)} of {attempt.num_nodes} nodes, and {devices} of {attempt.world_size} devices"
    if len({crew.node_id for crew in crews}) != len(crews):
        yield "the gang has the same node twice"
    firsts = [sum(other.gpus for other in crews[:number]) for number in range(len(crews))]
    if [(crew.number, crew.first_rank) for crew in crews] != list(enumerate(firsts)):
        found = ", ".join(f"node {crew.number} from rank {crew.first_rank}" for crew in crews)
        yield f"the gang has nodes whose ranks are not consecutive: {found}"
    if (attempt.num_nodes > 1) != bool(attempt.nonce):
        yield f"the gang is on {attempt.num_nodes} nodes, and its nonce is {'missing' if not attempt.nonce else 'set'}"


def _amounting(attempt: StoredAttempt) -> Iterator[str]:
    still_open = len(attempt.open_crews)
    if attempt.ended_ns is not None and still_open:
        yield f"the attempt has ended, but is still open on {still_open} nodes"
    if attempt.ended_ns is None and not still_open:
        yield "the attempt has ended on every node, but is still open"
    states = ", ".join(crew.state for crew in attempt.crews)
    is_silent = any(crew.state is State.UNREACHABLE for crew in attempt.open_crews)
    if is_silent != (attempt.state is State.UNREACHABLE) or attempt.began != any(crew.began for crew in attempt.crews):
        yield f"the attempt is {attempt.state}, began {attempt.began}, but the states on its nodes are {states}"
    if attempt.reason is Reason.PEER_FAILED:
        yield "the attempt ended because of a failed peer, but no node reported the cause"
    cause = attempt.cause
    if cause is not None and cause.crew is not None and not 0 <= cause.crew < len(attempt.crews):
        yield f"the attempt ends because of node {cause.crew}, which does not belong to the attempt"
    if cause is not None and cause.reason is Reason.PEER_FAILED:
        yield "the attempt ends because of a failed peer, but no node reported the cause"


def _met(attempt: StoredAttempt, recorded: RecordedRun) -> Iterator[str]:
    if attempt.called_off and (attempt.chosen_json is not None or attempt.began):
        yield "the server cancelled the rendezvous, but the gang finished the rendezvous"
    chosen = attempt.chosen
    if chosen is not None and not len(chosen.addresses) == len(chosen.interfaces) == attempt.num_nodes:
        yield f"the gang is on {attempt.num_nodes} nodes, but its rendezvous has {len(chosen.addresses)} addresses"
    # A restored server may not know the chosen addresses.
    is_known = recorded.run.restored_ns is None
    if attempt.num_nodes > 1 and attempt.began and chosen is None and not attempt.called_off and is_known:
        yield "the attempt has begun without a rendezvous"


def _released(attempt: StoredAttempt) -> Iterator[str]:
    if not attempt.released:
        return
    early = [crew for crew in attempt.crews if not crew.returned and not _succeeded(crew)]
    if early or attempt.called_off:
        names = ", ".join(crew.node for crew in early)
        yield f"the server released the gang, but not all ranks had returned: {names or 'the attempt was cancelled'}"
    cause = attempt.cause
    if cause is not None and (cause.crew is None or not _failed_after_all(attempt, cause.crew)):
        yield f"the server released the gang, but the attempt ended early ({cause.reason})"


def _failed_after_all(attempt: StoredAttempt, number: int) -> bool:
    """Return True if the ranks on the given node ended without success."""
    crew = attempt.crews[number] if number < len(attempt.crews) else None
    return crew is not None and crew.ended_ns is not None and not _succeeded(crew)


def _succeeded(crew: StoredCrew) -> bool:
    return crew.reason is not None and MEANINGS[crew.reason].state is State.SUCCEEDED


RULES: tuple[Callable[[RecordedRun], Iterator[Violation]], ...] = (
    _one_end,
    _moves,
    _attempts_in_order,
    gangs,
    _facts_in_order,
    ledger,
    _created_once,
)
"""Invariant checks for single runs."""
