"""Which objects of a store are needed, and the fate of the others; pure.

    snapshots that are young or in use ─▶ their units ─▶ their packs        needed
    anything put less than a grace ago                                      needed: somebody may be about to point at it
    the rest                    not on the list ─▶ condemned                goes on the list now
                                on the list for less than the grace         waits
                                something that is still there points at it  waits
                                neither, and not put again since            deleted

A unit that is kept because it is young keeps its packs: whoever comes to use it will not look at them again. And
nothing goes before what points at it, whatever the list says: a snapshot may have come to need a unit that was on the
list already, and have grown old before any collection saw that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from serverless_gpu.environment.stores.base import Stored
from serverless_gpu.environment.stores.condemned_objects import Condemned, Sentence


class CollectionPlan(NamedTuple):
    """Fate of everything that was listed."""

    kept: tuple[Stored, ...]
    condemned: tuple[Stored, ...]
    waiting: tuple[Sentence, ...]
    deleted: tuple[Stored, ...]

    def remaining(self) -> tuple[str, ...]:
        """Return the keys of what is not deleted."""
        listed = (stored.key for stored in (*self.kept, *self.condemned))
        return (*listed, *(sentence.key for sentence in self.waiting))


def kept_snapshots(listed: Iterable[Stored], in_use: Collection[str], *, now_ns: int, keep_ns: int) -> frozenset[str]:
    """Return the keys of the snapshots that stay."""
    used = {f"snapshots/{address}" for address in in_use}
    return frozenset(stored.key for stored in listed if stored.key in used or now_ns - stored.put_ns < keep_ns)


def kept_parts(
    listed: Iterable[Stored], pointed_at: Collection[str] | None, *, now_ns: int, grace_ns: int
) -> frozenset[str]:
    """Return the keys of the units or packs that stay.

    Args:
        listed: all of them.
        pointed_at: keys that something which stays points at; None when that could not be read, then all stay.
        now_ns: the time.
        grace_ns: how long the others stay in any case.
    """
    return frozenset(
        stored.key
        for stored in listed
        if pointed_at is None or stored.key in pointed_at or now_ns - stored.put_ns < grace_ns
    )


def make_plan(
    listed: Iterable[Stored],
    kept: Collection[str],
    held: Collection[str],
    condemned: Condemned,
    *,
    now_ns: int,
    grace_ns: int,
) -> CollectionPlan:
    """Return the fate of each object of one kind.

    Args:
        listed: all of them.
        kept: keys of what stays.
        held: keys that something which is not deleted now points at.
        condemned: the list as it is.
        now_ns: the time.
        grace_ns: how long an object is on the list before it may be deleted.
    """
    sentences: Mapping[str, Sentence] = {sentence.key: sentence for sentence in condemned.entries}
    plan: tuple[list[Stored], list[Stored], list[Sentence], list[Stored]] = ([], [], [], [])
    keep, condemn, wait, delete = plan
    for stored in listed:
        sentence = sentences.get(stored.key)
        if stored.key in kept:
            keep.append(stored)
        elif sentence is None or sentence.put_ns != stored.put_ns or not sentence.since_ns:
            condemn.append(stored)
        elif stored.key in held or now_ns - sentence.since_ns < grace_ns:
            wait.append(sentence)
        else:
            delete.append(stored)
    return CollectionPlan(tuple(keep), tuple(condemn), tuple(wait), tuple(delete))


def joined(*plans: CollectionPlan) -> CollectionPlan:
    """Return the plans of several kinds as one, in their order."""
    kept, condemned, waiting, deleted = (tuple(chain.from_iterable(parts)) for parts in zip(*plans, strict=True))
    return CollectionPlan(kept, condemned, waiting, deleted)
