"""Computes the current costs of runs from ledger entries and unposted facts, and estimates costs.

    attempt ─┬─ charged ──────────────▶ its entries ──┐
             └─ running, or uncharged ─▶ its facts ───┴─▶ lines ─▶ `model.cost.together` ─▶ Cost
                                         up to the last report

    resources ─▶ devices that could serve the run, with current prices ─▶ those of the first node, or the
                 most expensive ones ─▶ `model.cost.estimated` ─▶ CostEstimate

Failure cases: If an attempt's facts contradict each other, its usage counts as zero, as in the ledger. If no known node
can serve a run, the estimate contains a reason instead of a price.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.ledger import LedgerLine
from serverless_gpu.model.cost import AttemptDuration, AttemptUse, Cost, CostEstimate, Devices, estimated, together
from serverless_gpu.model.hardware import CPU, census, matches
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Fact, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.lifecycle import metering
from serverless_gpu.server.lifecycle.metering import Now
from serverless_gpu.server.records import attempts, charges, facts, nodes, pools, prices
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.charges import PostedEntry
from serverless_gpu.server.records.crews import StoredCrew
from serverless_gpu.server.records.pools import RESERVED
from serverless_gpu.server.records.runs import StoredRun

ADVICE = "set a price with `sgpu price set {name} …`"


def cost_of(connection: sa.Connection, run: StoredRun, at: Now) -> Cost:
    """Return the usage and the costs of all attempts of a run so far.

    The transaction must read the ledger and the facts from one snapshot.
    """
    return costs_of(connection, [run], at)[run.id]


def costs_of(connection: sa.Connection, found: Sequence[StoredRun], at: Now) -> dict[str, Cost]:
    """Return the usage and costs of several runs so far, by run identifier."""
    tried = attempts.of_runs(connection, [run.id for run in found])
    posted = charges.of_attempts(connection, tried.keys())
    open_ones = [crew.id for attempt in tried.values() for crew in attempt.crews if not _is_charged(crew)]
    told = facts.ends_of_crews(connection, open_ones)
    by_run: dict[str, list[StoredAttempt]] = {run.id: [] for run in found}
    for (run_id, _), attempt in sorted(tried.items()):
        by_run[run_id].append(attempt)

    def cost(run: StoredRun) -> Cost:
        used: list[AttemptUse] = []
        before: StoredAttempt | None = None
        for attempt in by_run[run.id]:
            own = posted[run.id, attempt.fence]
            waited_ms = metering.waited_ms(run.created_ns, before, attempt.created_ns)
            so_far = [lines_so_far(attempt, crew, told.get(crew.id, ()), at) for crew in attempt.crews]
            used.append(_used(attempt, own, so_far, waited_ms))
            before = attempt
        waits_ms = metering.waited_ms(run.created_ns, before, at.wall_ns) if run.state is State.QUEUED else 0
        return together(used, waits_ms=waits_ms, is_final=run.state in TERMINAL and run.finished)

    return {run.id: cost(run) for run in found}


def _is_charged(crew: StoredCrew) -> bool:
    """Return True if the ledger contains all entries of an attempt on a node."""
    return crew.ended_ns is not None and not crew.uncharged


def _used(
    attempt: StoredAttempt, posted: Sequence[PostedEntry], so_far: Sequence[tuple[LedgerLine, ...]], waited_ms: int
) -> AttemptUse:
    """Return the usage of an attempt on each node, from the ledger, or from facts if uncharged."""
    lines: list[LedgerLine] = []
    is_final = True
    for crew, used in zip(attempt.crews, so_far, strict=True):
        own = [one for one in posted if one.crew == crew.number]
        is_charged = _is_charged(crew)
        lines += [one.entry.line for one in own] if is_charged else used
        is_final = is_final and is_charged and not charges.may_change(own)
    return AttemptUse(
        lines=tuple(lines),
        currency=attempt.tariff.currency,
        gpu_type=attempt.gpu_type,
        queued_ms=sum(one.queued_ms for one in posted) if posted else waited_ms,
        is_final=is_final,
    )


def lines_so_far(
    attempt: StoredAttempt, crew: StoredCrew, own_facts: Sequence[Fact], at: Now
) -> tuple[LedgerLine, ...]:
    """Return the metering lines of an uncharged attempt on a node; empty for contradictory facts."""
    try:
        return metering.so_far(attempt, crew, own_facts, at)
    except InvalidValue:
        return ()


# --- cost estimates ---------------------------------------------------------------------------------------------------


class CostRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a cost estimate for a run."""

    spec: RunSpec  # Spec of the run, with the fields that the usage policy adds.
    pool: str  # The pool of the run; "" for any on-demand pool.
    node: str = ""  # Name of the first node on which the run would start, or "".
    several_nodes: bool = False  # True if the run may use several nodes when no single node has enough devices.
    expected_s: float | None = None  # Expected seconds for which the run will hold devices.
    limit: str = "timeout"  # The name of the time limit that applies to the run.


def estimate(connection: sa.Connection, wish: CostRequest, *, now_ns: int, currency: str) -> CostEstimate:
    """Return an estimate of the cost of a run."""
    spec = wish.spec
    lasting = AttemptDuration(
        limit_s=spec.limit_s,
        limit=wish.limit,
        expected_s=wish.expected_s,
        tries=1 + spec.retries,
        resumes=spec.resume,
    )
    places = _places(connection, wish)
    if not places:
        return CostEstimate(currency=currency, basis="no node that has joined can serve the run")
    wanted = spec.resources
    found = [
        Devices(
            gpu_type=gpu_type,
            count=count,
            cpus=wanted.cpus or 0,
            memory_bytes=wanted.memory_bytes or 0,
            tariff=prices.tariff(connection, gpu_type, pool, now_ns, currency),
        )
        for gpu_type, pool, count in places
    ]
    costs = [estimated(each, lasting, advice=ADVICE.format(name=each.gpu_type)) for each in found]
    # Sort unpriced devices first, so that the estimate shows no other pool's price as the maximum.
    dearest = max(costs, key=lambda cost: (cost.micros_per_hour is None, cost.micros_per_hour or 0))
    if len({cost.micros_per_hour for cost in costs}) == 1:
        return dearest
    return msgspec.structs.replace(
        dearest, basis=f"{dearest.basis}; for the most expensive devices that the run may use"
    )


def _places(connection: sa.Connection, wish: CostRequest) -> list[tuple[str, str, int]]:
    """Return type, pool and number of the devices on which a run would start, or could start later."""
    wanted = wish.spec.resources
    reserved = {pool.name for pool in pools.every(connection) if pool.kind == RESERVED}
    found: dict[str, set[tuple[str, str, int]]] = {}
    # A gang may also use several nodes if no single node has enough devices.
    parts: dict[str, set[tuple[str, str, int]]] = {}
    for node in nodes.every(connection):
        is_open = node.pool == wish.pool if wish.pool else node.pool not in reserved
        if not is_open and node.name != wish.node:  # The run may borrow devices in a reserved pool.
            continue
        total, _ = census(node.hello.devices, node.unavailable)
        for gpu_type, there in total.items():
            own = node.hello.own_types
            fits = matches(wanted.gpu_type, gpu_type, own) if wanted.gpu_type is not None else gpu_type != CPU
            count = there if wanted.gpus is None else wanted.gpus
            if fits and count > 0 and there > 0:
                (found if count <= there else parts).setdefault(node.name, set()).add((gpu_type, node.pool, count))
    if not found and wish.several_nodes:
        found = parts
    chosen = found.get(wish.node) or set().union(*found.values())
    if not chosen and wanted.gpus is not None and wanted.gpu_type is not None:
        # No node has the requested number of devices, but the devices may have a price.
        return [(wanted.gpu_type, wish.pool, wanted.gpus)]
    return sorted(chosen)
