"""Gathers what is known after the faults: clients' journals, ranks' signs of life, the API, the ledger."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from serverless_gpu.errors import NotFound
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.wire.billing import UsageView
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import AttemptList, AttemptView, RunPage, RunView
from tests.e2e.chaos import plan
from tests.e2e.chaos.cluster import ENDED_S, Cluster
from tests.e2e.chaos.verdict import ENDED, Evidence, Execution, Seen, Told


def gather(cluster: Cluster, seed: int, complaints: list[str]) -> Evidence:
    """Return what is known once everything has ended, or should have.

    Args:
        cluster: whose server still works.
        seed: of the clients' calls.
        complaints: what was wrong already.
    """
    token = (cluster.home / "server" / "token").read_text(encoding="ascii").strip()
    with contextlib.closing(Connection(cluster.url, token, patience_s=60)) as connection:
        _wait_until(lambda: all(run.state in ENDED and run.finished for run in _runs(connection)))
        complaints += cluster.orphans()
        _wait_until(lambda: _usage(connection).going == 0)
        charged = {group.key[0]: group.amounts.gpu_ms for group in _usage(connection).groups}
        seen = {run.id: _seen(connection, run, charged.get(run.id, 0)) for run in _runs(connection)}
    for words in (("server", "check"), ("audit", "verify")):
        done = cluster.command(*words)
        if done.returncode:
            complaints.append(f"`sgpu {' '.join(words)}` exits with {done.returncode}: {done.stdout}{done.stderr}")
    return Evidence(
        told=list(_told(cluster.where, seed)),
        executions=list(_executions(cluster.where / "signs")),
        seen=seen,
        strikes=cluster.strikes,
        complaints=complaints,
    )


def _wait_until(look: Any) -> None:
    """Wait for a state as long as it may take; what is not so then shows in the evidence."""
    limit = time.monotonic() + ENDED_S
    while not look() and time.monotonic() < limit:
        time.sleep(0.5)


def _runs(connection: Connection) -> list[RunView]:
    found: list[RunView] = []
    cursor = ""
    while True:
        query = {"limit": "100", **({"cursor": cursor} if cursor else {})}
        page = connection.ask("GET", "/runs", answer=RunPage, query=query)
        found += page.runs
        if not (cursor := page.cursor):
            return found


def _usage(connection: Connection) -> UsageView:
    return connection.ask("GET", "/usage", answer=UsageView, query={"by": "run", "limit": "10000"})


def _seen(connection: Connection, run: RunView, charged_ms: int) -> Seen:
    attempts = connection.ask("GET", f"/runs/{run.id}/attempts", answer=AttemptList).attempts
    nodes = {attempt.fence: _nodes(attempt) for attempt in attempts}
    receipts = {
        (fence, crew): _gpu_ms(connection, run.id, fence, crew)
        for fence, names in nodes.items()
        for crew in range(len(names))
    }
    return Seen(
        run=run.id,
        name=run.spec.tags.get("call", ""),
        state=str(run.state),
        reason=str(run.reason or ""),
        nodes=nodes,
        receipts_ms=receipts,
        charged_ms=charged_ms,
    )


def _nodes(attempt: AttemptView) -> tuple[str, ...]:
    return tuple(crew.node for crew in sorted(attempt.crews, key=lambda crew: crew.number)) or (attempt.node,)


def _gpu_ms(connection: Connection, run_id: str, fence: int, crew: int) -> int | None:
    query = {"fence": str(fence), "crew": str(crew)}
    try:
        return connection.ask("GET", f"/runs/{run_id}/receipt", answer=Receipt, query=query).gpu_ms
    except NotFound:
        return None


def _told(where: Path, seed: int) -> Iterator[Told]:
    for client in range(plan.CLIENTS):
        lines: dict[int, dict[str, Any]] = {}
        for text in (where / f"client{client}.jsonl").read_text().split("\n")[:-1]:
            line = json.loads(text)
            lines.setdefault(line["call"], {}).update(line)
        for call in islice(plan.calls(seed, client), max(lines, default=-1) + 1):
            line = lines.get(call.number, {})
            yield Told(
                name=plan.name_of(client, call),
                call=call,
                run=line.get("run", ""),
                outcome=line.get("outcome", ""),
                reason=f"{line.get('reason') or ''} {line.get('message', '')}".strip(),
            )


def _executions(signs: Path) -> Iterator[Execution]:
    for path in sorted(signs.iterdir()):
        name, run, fence, rank, pid = path.name.split(".")
        lines = path.read_text().split("\n")[:-1]
        moments = [int(line) for line in lines[1:] if line != "end"]
        if not moments:
            continue
        place = json.loads(lines[0])
        yield Execution(
            name=name,
            run=run,
            fence=int(fence),
            rank=int(rank),
            pid=int(pid),
            crew=place["crew"],
            gpu=place["gpus"][place["local"]],
            begin_ns=moments[0],
            end_ns=moments[-1],
        )
