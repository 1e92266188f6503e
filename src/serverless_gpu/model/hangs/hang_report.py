"""Formats a one-line message about a hung run and a report file with the stacks of all ranks.

`hang_detection.py` decides when the supervisor reports a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from serverless_gpu.model.hangs.hang_detection import STOPPED, TRACED, RankInspection, RankSeen
from serverless_gpu.model.placement import CrewPlace, numbered
from serverless_gpu.units import format_duration_ms

RANK_CHARACTERS_MAX = 256 << 10
_RANKS_LISTED = 8
_NODES_LISTED = 4
_PLACES_LISTED = 3
STACKS_TOLD = 4
STACK_CHARACTERS_MAX = 4_000
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible kernel wait",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}


class HangFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks and inspections of a hung run."""

    waiting: tuple[int, ...]  # Ranks that wait for other ranks.
    elsewhere: tuple[int, ...]  # Ranks that do not wait for other ranks.
    looks: dict[int, RankInspection]  # The last inspection by rank, without ranks that have returned.
    first: dict[int, RankInspection]  # The first inspection of the current silence, by rank.
    moving: frozenset[int]  # Ranks that moved between inspections.
    silent_ms: int  # Duration without output in milliseconds.
    watched_ms: int  # Duration of the inspections in milliseconds.


def ranks_text(ranks: Sequence[int]) -> str:
    """Return up to eight ranks as text, such as ``rank 3`` or ``ranks 0, 1``."""
    shown = ", ".join(map(str, ranks[:_RANKS_LISTED]))
    more = f" and {len(ranks) - _RANKS_LISTED} more" if len(ranks) > _RANKS_LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def ranks_on(crews: Collection[CrewPlace], *, per_node: bool) -> Callable[[Sequence[int]], str]:
    """Return a function that names ranks with their nodes, such as ``ranks 0, 1 on n1``."""
    owned = [(crew.node, numbered(crew, per_node=per_node)) for crew in crews]

    def text(ranks: Sequence[int]) -> str:
        groups = [(node, [rank for rank in ranks if rank in own]) for node, own in owned]
        named = [f"{ranks_text(there)} on {node}" for node, there in groups if there]
        more = [f"ranks on {len(named) - _NODES_LISTED} more nodes"] if len(named) > _NODES_LISTED else []
        return ", ".join([*named[:_NODES_LISTED], *more])

    return text


def sentence(finding: HangFinding) -> str:
    """Return a one-line message that names the waiting ranks and the ranks that hold them up."""
    seen = [
        RankSeen(rank=rank, state=look.state, where=look.stack.where(), moving=rank in finding.moving)
        for rank, look in finding.looks.items()
    ]
    return hang_sentence(seen, finding.waiting, finding.elsewhere, finding.silent_ms)


def hang_sentence(
    seen: Iterable[RankSeen],
    waiting: Sequence[int],
    elsewhere: Sequence[int],
    silent_ms: int,
    named: Callable[[Sequence[int]], str] = ranks_text,
) -> str:
    """Return a one-line message that names the waiting ranks and the ranks that hold them up."""
    who = _who_waits({one.rank: one for one in seen}, waiting, elsewhere, named)
    return f"no output for {format_duration_ms(silent_ms)}, and {who}"


def stacks(finding: HangFinding) -> dict[int, str]:
    """Return the main thread stacks of ranks that do not wait, or of waiting ranks if all ranks wait."""
    running = [rank for rank in finding.elsewhere if rank in finding.looks] or list(finding.waiting)
    chosen = [finding.looks[rank] for rank in running[:STACKS_TOLD]]
    return {look.rank: _main(look)[:STACK_CHARACTERS_MAX] for look in chosen}


def report(finding: HangFinding, title: str, ranks: Iterable[int], told: str = "") -> str:
    """Return the text of the report file with the stacks of all ranks."""
    rows = [_row(finding, rank) for rank in ranks]
    parts = [
        f"{title}\n{told or sentence(finding)}",
        f"rank  pid        state, kernel function, CPU time in the last {format_duration_ms(finding.watched_ms)}\n"
        + "\n".join(rows),
        *(_section(finding, look) for _, look in sorted(finding.looks.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _who_waits(
    seen: Mapping[int, RankSeen],
    waiting: Sequence[int],
    elsewhere: Sequence[int],
    named: Callable[[Sequence[int]], str],
) -> str:
    if not waiting:
        return _elsewhere(seen, elsewhere, named)
    there = _grouped(seen[rank] for rank in waiting)
    if not elsewhere:
        places = _joined(f"{named(ranks)} in {place or 'an unknown place'}" for place, ranks in there)
        return f"every rank waits ({places})"
    who = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    place = f" in {there[0][0]}" if len(there) == 1 and there[0][0] else ""
    return f"{who}{place}: {_elsewhere(seen, elsewhere, named)}"


def _elsewhere(seen: Mapping[int, RankSeen], elsewhere: Sequence[int], named: Callable[[Sequence[int]], str]) -> str:
    ranks = [seen[rank] for rank in elsewhere if rank in seen]
    stopped = [one.rank for one in ranks if one.state == STOPPED]
    traced = [one.rank for one in ranks if one.state == TRACED]
    others = [one for one in ranks if one.state not in (STOPPED, TRACED)]
    gone = [rank for rank in elsewhere if rank not in seen]
    parts = [f"{named(stopped)} {_be(stopped)} stopped (SIGSTOP)"] if stopped else []
    parts += [f"{named(traced)} {_be(traced)} stopped by a debugger"] if traced else []
    parts += [
        f"{named(group)} {_be(group)} {'busy' if all(seen[rank].moving for rank in group) else 'elsewhere'}"
        + (f", in {place}" if place else "")
        for place, group in _grouped(others)
    ]
    parts += [f"{named(gone)} {'has' if len(gone) == 1 else 'have'} returned"] if gone else []
    return _joined(parts)


def _grouped(ranks: Iterable[RankSeen]) -> list[tuple[str, list[int]]]:
    """Return groups of ranks with the same stack, ordered by the lowest rank."""
    groups: dict[str, list[int]] = {}
    for one in sorted(ranks, key=lambda one: one.rank):
        groups.setdefault(one.where, []).append(one.rank)
    return list(groups.items())


def _joined(parts: Iterable[str]) -> str:
    shown = list(parts)
    return ", ".join([*shown[:_PLACES_LISTED], *(["and more"] if len(shown) > _PLACES_LISTED else [])])


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _row(finding: HangFinding, rank: int) -> str:
    look = finding.looks.get(rank)
    if look is None:
        return f"{rank:<5} {'':<10} has returned"
    used_ms = look.cpu_ms - finding.first.get(rank, look).cpu_ms
    parts = [_STATES.get(look.state, "unknown"), *([look.channel] if look.channel else [])]
    parts += [format_duration_ms(max(0, used_ms)), *([look.note] if look.note else [])]
    return f"{rank:<5} {look.pid:<10} {', '.join(parts)}"


def _section(finding: HangFinding, look: RankInspection) -> str:
    role = "waits" if look.rank in finding.waiting else "elsewhere"
    lines = [f"---- rank {look.rank} ({role}) ----"]
    if look.note:
        lines.append(look.note)
    lines.append(f"main thread (most recent call first):\n{_main(look)}")
    text = "\n".join(lines)
    if len(text) > RANK_CHARACTERS_MAX:
        text = f"{text[:RANK_CHARACTERS_MAX]}\n... {len(text) - RANK_CHARACTERS_MAX} characters left out"
    return text


def _main(look: RankInspection) -> str:
    return look.stack.main.body() if look.stack.main is not None and look.stack.frames else "  (no stack)"
