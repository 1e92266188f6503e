"""What the crews of gangs have said that are to meet, and what follows from it: values, and memory that may be lost.

    Gathered   of one gang: who was heard of, offers, reaches, since when    `heard` ─▶ the next one
               ─▶ `offers_for` a crew   ─▶ `outcome`: how they meet, or who does not reach whom
               ─▶ `overdue`: why they are waited for no longer               judged by boottime

Crews repeat their offer and what they reached in every report until their user code begins. So a server that starts
knows nothing and is told all of it again, and its limits begin anew.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.rendezvous import (
    ADDRESSES_MAX,
    PROBLEM_CHARACTERS_MAX,
    SAVED_MAX,
    Apart,
    Chosen,
    CrewReach,
    Offer,
    choose,
    is_interface,
)
from serverless_gpu.server.records.runs.crews import CrewId, Gang

COME_S = 300.0
"""How long a crew is waited for of which nothing is heard at all."""
MEET_S = 120.0
"""How long crews may take to try each other, once all have said where they can be tried."""
TOTAL_S = 3_600.0
"""How long crews are waited for that are heard of, and fetch their environment, say."""
_ADDRESS = re.compile(r"[0-9A-Za-z:.%_-]{1,64}")
_MICROSECONDS_MAX = 1 << 40


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a gang that is to meet.

    Attributes:
        since_ns: when this process saw it first, boottime in nanoseconds.
        offered_ns: when the last of its offers came; None as long as one is missing.
        offers: by crew; the first that each made.
        reaches: likewise.
        heard_ns: when each crew was heard of last.
    """

    since_ns: int
    offered_ns: int | None = None
    offers: Mapping[int, Offer] = msgspec.field(default_factory=dict)
    reaches: Mapping[int, CrewReach] = msgspec.field(default_factory=dict)
    heard_ns: Mapping[int, int] = msgspec.field(default_factory=dict)

    def heard(self, number: int, *, of: int, offer: Offer | None, reach: CrewReach | None, now_ns: int) -> Gathered:
        """Return what is known after a crew reported; what it said first stays.

        Args:
            number: of the crew.
            of: how many crews there are.
            offer: where it can be tried, or None.
            reach: what it reached, or None; it may come before all offers are here again.
            now_ns: boottime, nanoseconds.
        """
        offers = self.offers if offer is None else {number: offer, **self.offers}
        reaches = self.reaches if reach is None else {number: reach, **self.reaches}
        offered_ns = now_ns if self.offered_ns is None and len(offers) == of else self.offered_ns
        heard_ns = {**self.heard_ns, number: now_ns}
        return Gathered(
            since_ns=self.since_ns, offered_ns=offered_ns, offers=offers, reaches=reaches, heard_ns=heard_ns
        )

    def offers_for(self, number: int) -> tuple[Offer, ...]:
        """Return what a crew is told: all offers, once they are here, and until it has said what it reached."""
        if self.offered_ns is None or number in self.reaches:
            return ()
        return tuple(self.offers[one] for one in sorted(self.offers))

    def outcome(self, nodes: Sequence[str], *, now_ns: int, quiet_s: float) -> Chosen | Apart | None:
        """Return how a gang meets, or why not; None as long as something is missing, or somebody is quiet.

        Args:
            nodes: names of the crews' nodes, by their numbers.
            now_ns: boottime, nanoseconds.
            quiet_s: how long nothing may have been heard of any crew: user code would wait for one that is gone.
        """
        everybody = range(len(nodes))
        if any(number not in self.offers or number not in self.reaches for number in everybody):
            return None
        if any(now_ns - self.heard_ns.get(number, self.since_ns) > quiet_s * 1e9 for number in everybody):
            return None
        return choose(list(self.offers.values()), list(self.reaches.values()), nodes)

    def overdue(self, nodes: Sequence[str], known: Collection[int], *, now_ns: int, age_s: float) -> str:
        """Return why a gang is waited for no longer, for people, or "".

        Args:
            nodes: names of the crews' nodes, by their numbers.
            known: crews that were heard of by whichever process, by their numbers.
            now_ns: boottime, nanoseconds.
            age_s: since it was placed, by the wall clock: servers that are started again and again wait no longer.
        """
        waited_s = (now_ns - self.since_ns) / 1e9
        missing = [number for number in range(len(nodes)) if number not in self.offers]
        unheard = [number for number in missing if number not in known and number not in self.heard_ns]
        if unheard and waited_s > COME_S:
            return f"{_named(nodes, unheard)} not come to the meeting"
        if missing and (waited_s > TOTAL_S or (age_s > 3 * TOTAL_S and waited_s > MEET_S)):
            return f"{_named(nodes, missing)} not come to the meeting"
        if self.offered_ns is None or now_ns - self.offered_ns <= MEET_S * 1e9:
            return ""
        silent = [number for number in range(len(nodes)) if number not in self.reaches]
        if silent:
            return f"{_named(nodes, silent)} not said which nodes can be reached from there"
        quietest = min(self.heard_ns, key=lambda number: self.heard_ns[number])
        return f"{_named(nodes, [quietest])} gone silent while the run's nodes met"


class Meetings:
    """Gangs that are to meet, as this process has heard of them. Any thread may call; it takes the time as a value."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gathered: dict[Gang, Gathered] = {}

    def hear(
        self, crew: CrewId, *, of: int, offer: Offer | None, reach: CrewReach | None, now_ns: int
    ) -> tuple[Gathered, bool]:
        """Note what a crew said.

        Args:
            crew: run, fence and number.
            of: how many crews there are.
            offer: where it can be tried, or None.
            reach: what it reached, or None.
            now_ns: boottime, nanoseconds.

        Returns:
            What is known now, and whether the last of the offers came with it.
        """
        run_id, fence, number = crew
        with self._lock:
            before = self._gathered.get((run_id, fence)) or Gathered(since_ns=now_ns)
            now = before.heard(number, of=of, offer=offer, reach=reach, now_ns=now_ns)
            self._gathered[run_id, fence] = now
            return now, before.offered_ns is None and now.offered_ns is not None

    def see(self, gang: Gang, *, now_ns: int) -> Gathered:
        """Return what is known of a gang; one that was never heard of is waited for from now on."""
        with self._lock:
            return self._gathered.setdefault(gang, Gathered(since_ns=now_ns))

    def find(self, gang: Gang) -> Gathered | None:
        """Return what is known of a gang, or None."""
        with self._lock:
            return self._gathered.get(gang)

    def keep(self, gangs: Collection[Gang]) -> None:
        """Forget all gangs but these."""
        with self._lock:
            self._gathered = {gang: known for gang, known in self._gathered.items() if gang in gangs}


def gone(nodes: Sequence[str], silent: Sequence[int]) -> str:
    """Return why a gang is called off whose nodes went silent, for people.

    Args:
        nodes: names of the crews' nodes, by their numbers.
        silent: numbers of the crews.
    """
    return f"{_named(nodes, silent)} gone silent before the run's nodes had met"


def check(gang: str, number: int, *, of: int, offer: Offer | None, reach: CrewReach | None) -> None:
    """Refuse what no crew can have said; the others are told it, and some of it becomes their ranks' variables.

    Args:
        gang: the attempt's name.
        number: of the crew, as its token says.
        of: how many crews there are.
        offer: where it can be tried, or None.
        reach: what it reached, or None.

    Raises:
        InvalidValue: so it is.
    """
    if offer is None and reach is None:
        return
    if of == 1:
        raise InvalidValue(f"attempt {gang} is on one node, which has nobody to meet")
    for said in (offer, reach):
        if said is not None and said.crew != number:
            raise InvalidValue(f"crew {number} of attempt {gang} speaks for crew {said.crew}")
    if offer is not None:
        _check_offer(gang, number, offer)
    if reach is not None:
        _check_reach(gang, number, reach, of=of)


def _check_offer(gang: str, number: int, offer: Offer) -> None:
    lowest = 1 if number == 0 else 0
    if not 0 < offer.port < 1 << 16 or not lowest <= offer.rendezvous_port < 1 << 16:
        raise InvalidValue(f"crew {number} of attempt {gang} offers a port that cannot be")
    if len(offer.addresses) > ADDRESSES_MAX:
        raise InvalidValue(f"crew {number} of attempt {gang} offers more than {ADDRESSES_MAX} addresses")
    if len(offer.saved) > SAVED_MAX or not all(0 < fence < 1 << 31 for fence in offer.saved):
        raise InvalidValue(f"crew {number} of attempt {gang} has checkpoints of attempts that cannot be")
    if not all(is_interface(one.interface) and _ADDRESS.fullmatch(one.address) for one in offer.addresses):
        raise InvalidValue(f"crew {number} of attempt {gang} offers an address that cannot be")


def _check_reach(gang: str, number: int, reach: CrewReach, *, of: int) -> None:
    if len(reach.tried) > (of - 1) * ADDRESSES_MAX:
        raise InvalidValue(f"crew {number} of attempt {gang} has tried more addresses than there can be")
    for one in reach.tried:
        if not 0 <= one.crew < of or one.crew == number or _ADDRESS.fullmatch(one.address) is None:
            raise InvalidValue(f"crew {number} of attempt {gang} has tried an address that cannot be")
        if one.microseconds is not None and not 0 <= one.microseconds <= _MICROSECONDS_MAX:
            raise InvalidValue(f"crew {number} of attempt {gang} was answered after a time that cannot be")
        if len(one.problem) > PROBLEM_CHARACTERS_MAX:
            raise InvalidValue(f"a problem has {PROBLEM_CHARACTERS_MAX} characters at most")


def _named(nodes: Sequence[str], numbers: Sequence[int]) -> str:
    """Return which nodes have done something, or not, with the verb."""
    named = ", ".join(nodes[number] for number in numbers[:3])
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"{named}{more} {'has' if len(numbers) == 1 else 'have'}"
