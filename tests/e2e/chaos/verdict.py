"""What must not be, of what clients, ranks, the API and the ledger say after an hour of faults. Pure.

lost          a run that was accepted has no end, or its client no answer, or they differ
doubled       user code of a rank ran twice in an attempt, or in more attempts than were asked for
overlapping   a device was in two hands, or two attempts of a run were there at once
unexplained   a run ended in a way that neither its call nor a fault accounts for
ledger        what is charged is not what receipts say, or less than user code used
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.e2e.chaos import plan

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "TIMED_OUT", "BUDGET_STOPPED", "LOST"})
UNSEEN_MS = {False: 100, True: 5_000}
"""What a rank may have used unseen, by whether its run was struck: ranks outlive a killed supervisor by a moment."""
WIDE = frozenset({"agent", "uplink", "server", "server-stopped"})
"""Victims that may cost any run its start; a rank, a stem or a supervisor costs its own run only."""


class Strike(NamedTuple):
    """A fault that hit."""

    at_ns: int
    victim: str
    run: str


class Told(NamedTuple):
    """What a client was told about one call; `run` and `outcome` are "" where it was not."""

    name: str
    call: plan.Call
    run: str
    outcome: str
    reason: str


class Execution(NamedTuple):
    """User code in one rank of one attempt, by CLOCK_BOOTTIME."""

    name: str
    run: str
    fence: int
    rank: int
    pid: int
    crew: int
    gpu: str
    begin_ns: int
    end_ns: int


class Seen(NamedTuple):
    """A run as the API has it once all is over.

    Attributes:
        name: its tag.
        nodes: by fence, the node of each crew.
        receipts_ms: GPU-milliseconds of its receipts; None for an attempt's crew without one.
        charged_ms: GPU-milliseconds of the ledger.
    """

    run: str
    name: str
    state: str
    reason: str
    nodes: Mapping[int, Sequence[str]]
    receipts_ms: Mapping[tuple[int, int], int | None]
    charged_ms: int


class Evidence(NamedTuple):
    """All that is known afterwards; `complaints` are wrong whatever the rest says."""

    told: Sequence[Told]
    executions: Sequence[Execution]
    seen: Mapping[str, Seen]
    strikes: Sequence[Strike]
    complaints: Sequence[str] = ()


def wrongs(evidence: Evidence) -> list[str]:
    """Return what must not be, one sentence each."""
    return [
        *evidence.complaints,
        *_lost(evidence),
        *_doubled(evidence),
        *_overlapping(evidence),
        *_unexplained(evidence),
        *_ledger(evidence),
    ]


def _lost(evidence: Evidence) -> Iterator[str]:
    for told in evidence.told:
        if not told.run:
            continue
        seen = evidence.seen.get(told.run)
        if seen is None:
            yield f"lost: {told.name} was accepted as {told.run}, which the server does not know"
        elif not told.outcome:
            yield f"lost: the client of {told.name} ({told.run}, {seen.state}) was never told how it ended"
        elif (told.outcome == "value") != (seen.state == "SUCCEEDED"):
            yield f"lost: {told.name} ({told.run}) is {seen.state}, and its client was told {told.outcome}"
    for seen in evidence.seen.values():
        if seen.state not in ENDED:
            yield f"lost: {seen.name} ({seen.run}) is still {seen.state}"
    for execution in evidence.executions:
        if execution.run not in evidence.seen:
            yield f"lost: {execution.run} of {execution.name} ran, and the server does not know it"


def _doubled(evidence: Evidence) -> Iterator[str]:
    calls = {told.name: told.call for told in evidence.told}
    for key, count in Counter((one.run, one.fence, one.rank) for one in evidence.executions).items():
        if count > 1:
            yield f"doubled: rank {key[2]} of {key[0]}:{key[1]} ran {count} times"
    for name, count in Counter(seen.name for seen in evidence.seen.values()).items():
        if count > 1:
            yield f"doubled: {name} was asked for once, and is {count} runs"
    fences: dict[str, set[int]] = defaultdict(set)
    for one in evidence.executions:
        fences[one.run].add(one.fence)
    for run, numbers in fences.items():
        call = calls.get(evidence.seen[run].name) if run in evidence.seen else None
        if call is None or call.kind in plan.RESUMES:
            continue
        allowed = 1 + plan.RETRIES.get(call.kind, 0)
        if len(numbers) > allowed:
            yield f"doubled: user code of {run} ran in attempts {sorted(numbers)}, and {allowed} were asked for"


def _overlapping(evidence: Evidence) -> Iterator[str]:
    devices: dict[tuple[str, str], list[Execution]] = defaultdict(list)
    attempts: dict[str, list[Execution]] = defaultdict(list)
    for one in evidence.executions:
        seen = evidence.seen.get(one.run)
        nodes = seen.nodes.get(one.fence, ()) if seen is not None else ()
        if one.crew >= len(nodes):
            yield f"overlapping: nobody knows the node of crew {one.crew} of {one.run}:{one.fence}"
            continue
        devices[nodes[one.crew], one.gpu].append(one)
        attempts[one.run].append(one)
    for (node, gpu), some in devices.items():
        for first, second in _pairs(some):
            yield (
                f"overlapping: {gpu} of {node} had {first.run}:{first.fence} until {first.end_ns}"
                f" and {second.run}:{second.fence} from {second.begin_ns}"
            )
    for run, some in attempts.items():
        for first, second in _pairs(some):
            if first.fence != second.fence:
                yield f"overlapping: attempts {first.fence} and {second.fence} of {run} were there at once"


def _pairs(some: Sequence[Execution]) -> Iterator[tuple[Execution, Execution]]:
    """Yield those of them that were there while an earlier one still was."""
    latest: Execution | None = None
    for one in sorted(some, key=lambda execution: execution.begin_ns):
        if latest is not None and one.begin_ns < latest.end_ns:
            yield latest, one
        if latest is None or one.end_ns > latest.end_ns:
            latest = one


def _unexplained(evidence: Evidence) -> Iterator[str]:
    struck = {strike.run for strike in evidence.strikes if strike.run}
    is_wide = any(strike.victim in WIDE for strike in evidence.strikes)
    begun = {one.run for one in evidence.executions}
    for told in evidence.told:
        if not told.outcome or told.outcome == plan.EXPECTED[told.call.kind]:
            continue
        if told.call.kind == "cancel" and told.outcome == "value":
            continue  # it had ended before
        if told.call.kind in plan.RESUMES and told.outcome == "value":
            continue
        if told.run in struck or (told.run and told.run not in begun and is_wide):
            continue
        if told.call.kind == "cancel" and told.run not in struck and told.outcome == "RunCancelled":
            continue
        wanted = plan.EXPECTED[told.call.kind]
        yield f"unexplained: {told.name} ({told.run}) ended with {told.outcome} ({told.reason}), not with {wanted}"


def _ledger(evidence: Evidence) -> Iterator[str]:
    struck = {strike.run for strike in evidence.strikes}
    used_ms: Counter[str] = Counter()
    unseen_ms: Counter[str] = Counter()
    for one in evidence.executions:
        used_ms[one.run] += (one.end_ns - one.begin_ns) // 10**6
        unseen_ms[one.run] += UNSEEN_MS[one.run in struck]
    for seen in evidence.seen.values():
        total = sum(amount or 0 for amount in seen.receipts_ms.values())
        if total != seen.charged_ms:
            yield f"ledger: {seen.run} is charged {seen.charged_ms} GPU-ms, and its receipts say {total}"
        if seen.charged_ms < used_ms[seen.run] - unseen_ms[seen.run]:
            yield f"ledger: {seen.run} used {used_ms[seen.run]} GPU-ms, and is charged {seen.charged_ms}"
