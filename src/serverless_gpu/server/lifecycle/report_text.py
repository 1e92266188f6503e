"""Texts of a report: read as far as possible, and made fit to be stored and shown to people."""

from __future__ import annotations

import re

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.wire.attempts import Ending, Report
from serverless_gpu.wire.base import Json

SENTENCE_CHARACTERS_MAX = 2_000
DETAIL_CHARACTERS_MAX = 300
"""Of why a crew ends: people on other nodes read it."""
_LINK = re.compile(r"https?://[\x21-\x7e]{1,2000}")


class _Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `node.protocol.Stopped.cause` for people."""

    rank: int | None = None
    peer_lost: bool = False
    detail: str = ""


class _Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """What is read here of `node.protocol.Stopped`; the rest is for the client."""

    cause: _Cause | None = None


def halt(said: Report, ranks: range) -> Halt | None:
    """Return why a crew ends before its end: what it said of that, or else its ending."""
    if said.halt is not None:
        return msgspec.structs.replace(said.halt, detail=_line(said.halt.detail))
    ending = said.ending
    if ending is None or MEANINGS[ending.reason].state is State.SUCCEEDED:
        return None
    cause = cause_of(ending)
    if cause is None:
        return Halt(reason=ending.reason)
    rank = cause.rank if cause.rank in ranks else None
    return Halt(reason=ending.reason, rank=rank, peer_lost=cause.peer_lost, detail=_line(cause.detail))


def with_billed_loss(said: Report) -> Report:
    """Return a report that has `SUPERVISOR_LOST`, which costs nothing, only with evidence.

    A node before that distinction sends none; then the run pays, as for `SUPERVISOR_KILLED`.
    """
    ending = said.ending
    if ending is None or ending.reason is not Reason.SUPERVISOR_LOST:
        return said
    cause = cause_of(ending)
    if cause is not None and cause.detail:
        return said
    ending = msgspec.structs.replace(ending, reason=Reason.SUPERVISOR_KILLED)
    return msgspec.structs.replace(said, ending=ending)


def text(json: Json) -> str | None:
    """Return JSON as it came; None where nothing did."""
    text = bytes(json).decode() if isinstance(json, msgspec.Raw) else ""
    return None if text in ("", "null") else text


def tracked(said: Report) -> str:
    """Return the link to the run in MLflow, or "": people open it, and a node may say what it likes."""
    return said.tracked if _LINK.fullmatch(said.tracked) else ""


def sentence(said: Report) -> str:
    """Return what the node says about the attempt."""
    return storable(said.sentence)


def detail(said: Report) -> str:
    """Return the detail of an ending for people: what the node says, or which rank it was and why."""
    if said.ending is None or said.sentence or text(said.ending.stopped) is None:
        return sentence(said) if said.ending is not None else ""
    cause = cause_of(said.ending)
    if cause is None or not cause.detail:
        return ""
    line = cause.detail.strip().partition("\n")[0]
    return storable(line if cause.rank is None else f"rank {cause.rank}: {line}")


def cause_of(ending: Ending) -> _Cause | None:
    """Return what failed, as far as the node says so."""
    stopped = text(ending.stopped)
    try:
        return None if stopped is None else from_json(stopped, _Stopped).cause
    except msgspec.DecodeError:  # of another version; the client may know it
        return None


def storable(text: str) -> str:
    """Return text as PostgreSQL takes it, and not too much of it."""
    return text[:SENTENCE_CHARACTERS_MAX].replace("\0", "")


def _line(text: str) -> str:
    """Return the first line of a text, as others may read it on their terminals."""
    line = text.strip().partition("\n")[0][:DETAIL_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else " " for character in line)
