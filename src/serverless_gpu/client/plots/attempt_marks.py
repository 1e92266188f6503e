"""Marks of a run's attempts in its picture: start, stop request, failure, end.

    runs/<run>/<fence>/  facts.jsonl (boottime ↔ wall) · stop_reason · stopped.json  ─┐
    a server's list of attempts ──────────────────────────────────────────────────────┴─▶ Try, one per attempt ─▶ Mark

A killed attempt has no ending and no mark for it. An unreadable file counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from serverless_gpu.client.plots.curves import CurveMark
from serverless_gpu.model.lifecycle.attempt import MEANINGS, FactKind, Reason, State
from serverless_gpu.node.attempt.history import first_facts, read_ending
from serverless_gpu.node.supervisor.rank_environment import STOP_FILE

_WORD_CHARACTERS = 32


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; moments are nanoseconds since 1970, None where unknown or still to come."""

    fence: int
    state: State | None = None
    reason: Reason | None = None
    began_ns: int | None = None
    ended_ns: int | None = None
    asked_ns: int | None = None  # stop request
    asked: str = ""  # its reason, in the word that ranks read
    failed_ns: int | None = None  # first failure
    rank: int | None = None  # of the first failure


def attempts_here(run: Path) -> list[Path]:
    """Return the directories of a run's attempts on this machine, in order."""
    try:
        children = list(run.iterdir())
    except OSError:
        return []
    return sorted((path for path in children if path.name.isascii() and path.name.isdigit()), key=lambda p: int(p.name))


def read_try(directory: Path) -> Try:
    """Return an attempt from its directory."""
    facts = first_facts(directory)
    stopped = read_ending(directory)
    cause = stopped.cause if stopped is not None and stopped.state in (State.FAILED, State.LOST) else None
    failed_ns = None
    if cause is not None and facts and cause.at_ns > 0:  # facts of the same boot have both times
        failed_ns = facts[0].wall_ns + cause.at_ns - facts[0].boottime_ns
    return Try(
        fence=int(directory.name),
        state=None if stopped is None else stopped.state,
        reason=None if stopped is None else stopped.reason,
        began_ns=next((fact.wall_ns for fact in facts if fact.kind is FactKind.EXEC), None),
        ended_ns=None if stopped is None else _written_ns(directory / "stopped.json"),
        asked_ns=_written_ns(directory / STOP_FILE),
        asked=_word(directory / STOP_FILE),
        failed_ns=failed_ns,
        rank=None if cause is None else cause.rank,
    )


def marks(tries: Iterable[Try]) -> list[CurveMark]:
    """Return a run's marks: starts of later attempts, failures, stop requests."""
    found: list[CurveMark] = []
    for each in tries:
        name = f"attempt {each.fence}" if each.fence > 1 else ""
        if each.fence > 1 and each.began_ns is not None:
            found.append(CurveMark(each.began_ns / 1e9, "attempt", f"{name} began"))
        if each.asked_ns is not None:
            found.append(
                CurveMark(each.asked_ns / 1e9, "stop", _sentence(name, f"asked to stop: {each.asked or 'cancel'}"))
            )
        at_ns = each.failed_ns or each.ended_ns
        if each.state is None or each.reason is None or each.state is State.SUCCEEDED or at_ns is None:
            continue
        if each.state in (State.FAILED, State.LOST):
            rank = "" if each.rank is None else f", rank {each.rank}"
            text = f"{each.state.value} ({each.reason.value}{rank}): {MEANINGS[each.reason].sentence}"
            found.append(CurveMark(at_ns / 1e9, "failure", _sentence(name, text)))
        elif each.asked_ns is None:
            text = f"{each.state.value} ({each.reason.value}): {MEANINGS[each.reason].sentence}"
            found.append(CurveMark(at_ns / 1e9, "stop", _sentence(name, text)))
    return found


def _sentence(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text


def _written_ns(path: Path) -> int | None:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return None


def _word(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_WORD_CHARACTERS).strip()
    except OSError:
        return ""
