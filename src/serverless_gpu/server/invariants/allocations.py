"""I4: a device is never lent twice at the same time, from the reservation until it was looked at."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from serverless_gpu.model.billing import metering
from serverless_gpu.model.lifecycle.attempt import Fact
from serverless_gpu.server.invariants.invariant_inputs import Books, Violation

LENDINGS_MAX = 50_000
"""How many lendings are held against those of later pages."""

Place = tuple[str, ...]


class LentDevice(msgspec.Struct, frozen=True):
    began_ns: int
    ended_ns: int | None
    gang: str


def lent_once(books: Books) -> Iterator[Violation]:
    lent: dict[Place, list[LentDevice]] = {}
    for booked in books.runs:
        for attempt in booked.attempts:
            for crew in attempt.crews:
                own = booked.facts.get((crew.fence, crew.number), ())
                for place, one in of_facts(crew_name(attempt.gang, crew.number), crew.node_id, own):
                    lent.setdefault(place, []).append(one)
    for place, ones in lent.items():
        yield from doubly(place[-1], ones)


def crew_name(gang: str, number: int) -> str:
    """Return how a crew is called among those that have devices: two of one gang never have the same one."""
    return f"{gang} (crew {number})" if number else gang


def of_facts(gang: str, node_id: str, own: Sequence[Fact]) -> Iterator[tuple[Place, LentDevice]]:
    """Yield which devices a crew of an attempt had, and when: the same times that it is charged for.

    Args:
        gang: the attempt, as ``run:fence``, and which crew of it (`crew_name`).
        node_id: where it was.
        own: its facts, in their order.
    """
    for one in metering.lendings(own):
        for device in one.gpus:
            # What is declared is declared for each home; what the machine has is the machine's.
            place = (one.boot_id, "" if device.startswith(("GPU-", "MIG-")) else node_id, device)
            yield place, LentDevice(one.start_ns, one.end_ns, gang)


class Lendings:
    """Who had which device, of all books looked at so far: two runs that had one at once may be pages apart.

    Args:
        most: lendings that are remembered; the oldest are forgotten first.
    """

    def __init__(self, most: int = LENDINGS_MAX) -> None:
        self._most = most
        self._known: dict[tuple[Place, str, int], LentDevice] = {}
        self._of: dict[Place, list[LentDevice]] = {}

    def look(self, books: Books) -> list[Violation]:
        """Return which devices of these books were lent twice, among them and together with those before."""
        found: set[Violation] = set()
        for booked in books.runs:
            for attempt in booked.attempts:
                for crew in attempt.crews:
                    own = booked.facts.get((crew.fence, crew.number), ())
                    for place, one in of_facts(crew_name(attempt.gang, crew.number), crew.node_id, own):
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
        yield from doubly(place[-1], ones[max(0, at - 1) : at + 2])

    def _take(self, key: tuple[Place, str, int]) -> None:
        one, ones = self._known.pop(key), self._of[key[0]]
        del ones[ones.index(one, bisect_left(ones, one.began_ns, key=_began))]
        if not ones:
            del self._of[key[0]]


def _began(one: LentDevice) -> int:
    return one.began_ns


def doubly(device: str, ones: list[LentDevice]) -> Iterator[Violation]:
    ones.sort(key=_began)
    latest = ones[0]
    for one in ones[1:]:
        if latest.ended_ns is None or one.began_ns < latest.ended_ns:
            sentence = f"attempts {latest.gang} and {one.gang} had it at the same time"
            yield Violation(invariant="I4", subject=f"device {device}", sentence=sentence)
        if latest.ended_ns is not None and (one.ended_ns is None or one.ended_ns > latest.ended_ns):
            latest = one
