"""Captures, restores and collections in any order, call by call: what a snapshot needs is there.

Captures take less than the grace and no call more than its bound; everything else may happen: collections stand still
between any two calls, several begin at once, any process dies anywhere, times pass.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.collection import collect
from serverless_gpu.errors import StoreUnavailable
from tests.support.environment.environments_in_stores import capture
from tests.support.environment.stepped import Actor, World

CONTENTS = [b"%d" % number for number in range(4)]
GRACE_S = 3600
KEEP_S = 3 * GRACE_S

some = st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=3, unique=True)
KINDS = [("capture", "collection"), ("collection", "capture"), ("collection", "collection"), ("capture", "capture")]
turns = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 8)), max_size=10)


class Machine(RuleBasedStateMachine):
    """Processes on one store."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.published: dict[str, int] = {}
        self.in_use: set[str] = set()

    @initialize(contents=some, condemned=st.booleans())
    def there_is_something_old(self, contents: list[bytes], condemned: bool) -> None:
        """Begin where it gets dangerous: with what nobody needs, on the list for long enough or not on it yet."""
        # Somebody may have died while collecting: then a capture waits.
        blobs = StoreBlobs(self.world.memory, clock=self.world.clock, sleep=self.world.clock.advance)
        snapshot = capture(blobs, *contents)
        self.publish(snapshot)
        self.world.clock.advance(KEEP_S)
        if condemned:
            collect(blobs, in_use=self.in_use, keep_s=KEEP_S, grace_s=GRACE_S)
            self.world.clock.advance(GRACE_S)

    def blobs(self, actor: Actor) -> StoreBlobs:
        def sleep(seconds: float) -> None:
            with actor.store._one:
                actor.wait()

        return StoreBlobs(actor.store, clock=self.world.clock, sleep=sleep)

    @rule(contents=some)
    def capture_begins(self, contents: list[bytes]) -> None:
        def work(actor: Actor) -> None:
            snapshot = capture(self.blobs(actor), *contents)
            self.publish(snapshot)

        self.start(work)

    @rule()
    def collection_begins(self) -> None:
        def work(actor: Actor) -> None:
            collect(self.blobs(actor), in_use=frozenset(self.in_use), keep_s=KEEP_S, grace_s=GRACE_S)

        self.start(work)

    def publish(self, snapshot: Snapshot) -> None:
        self.published[snapshot.address] = self.world.clock.wall_ns()

    def start(self, work: object) -> None:
        if len(self.world.actors) < 4:
            self.world.start(work, seconds_max=GRACE_S - 1)  # type: ignore[arg-type]  # one of the two above

    @precondition(lambda self: self.world.actors)
    @rule(data=st.data(), calls=st.integers(1, 15))
    def goes_on(self, data: st.DataObject, calls: int) -> None:
        self.advance(data.draw(st.sampled_from(self.world.actors)), calls)

    @rule(contents=some, other=some, kinds=st.sampled_from(KINDS), turns=turns, pause=st.sampled_from([0, 0, 299]))
    def two_meet(
        self,
        contents: list[bytes],
        other: list[bytes],
        kinds: tuple[str, str],
        turns: list[tuple[int, int]],
        pause: int,
    ) -> None:
        """Let two processes take turns of a few calls each, and then end, while others stand."""
        pair: list[Actor] = []
        for kind, wanted in zip(kinds, (contents, other), strict=True):
            pair += [actor for actor in [self.start_one(kind, wanted)] if actor is not None]
        for which, calls in turns:
            if which < len(pair):
                self.advance(pair[which], calls)
                self.time_passes(pause)
        for _ in range(100):  # one may wait for another that stands
            for actor in pair:
                self.advance(actor, 1)

    def start_one(self, kind: str, contents: list[bytes]) -> Actor | None:
        before = list(self.world.actors)
        if kind == "capture":
            self.capture_begins(contents)
        else:
            self.collection_begins()
        new = [actor for actor in self.world.actors if actor not in before]
        return new[0] if new else None

    def advance(self, actor: Actor, calls: int) -> None:
        for _ in range(calls):
            if actor.over:
                break
            self.world.turn(actor)
            self.whole()
        self.check(actor)

    @precondition(lambda self: not self.world.actors)
    @rule(contents=some, condemned=st.booleans())
    def nobody_comes_for_long(self, contents: list[bytes], condemned: bool) -> None:
        self.there_is_something_old(contents, condemned)

    @precondition(lambda self: self.world.actors)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        self.world.kill(data.draw(st.sampled_from(self.world.actors)))

    @rule(seconds=st.sampled_from([1, 61, 299, 1201, GRACE_S - 1, GRACE_S, 2 * GRACE_S, KEEP_S]))
    def time_passes(self, seconds: int) -> None:
        self.world.clock.advance(max(0, min(seconds, self.world.spare_s())))

    @rule(data=st.data())
    def an_attempt_begins_or_ends(self, data: st.DataObject) -> None:
        # An attempt asks for its snapshot before a collection that began earlier could have missed it.
        if self.published and not self.world.actors:
            address = data.draw(st.sampled_from(sorted(self.published)))
            if address in self.in_use:
                self.in_use.discard(address)
            elif f"snapshots/{address}" in self.world.memory.present([f"snapshots/{address}"]):
                self.in_use.add(address)

    @invariant()
    def whole(self) -> None:
        """Every snapshot that is there has all it needs, and those in use and the young ones are there."""
        memory, now_ns = self.world.memory, self.world.clock.wall_ns()
        blobs = StoreBlobs(memory, clock=self.world.clock)
        there = {stored.key.partition("/")[2]: stored for stored in memory.list("snapshots")}
        for address in there:
            units = [blobs.read_unit(unit) for unit in blobs.read_snapshot(address).addresses()]
            packs = {f"packs/{digest}" for unit in units for digest in unit.packs}
            assert memory.present(packs) == packs
        assert self.in_use <= there.keys()
        # It was put some calls before its capture ended.
        young = {address for address, put_ns in self.published.items() if now_ns - put_ns < (KEEP_S - GRACE_S) * 10**9}
        assert young <= there.keys()

    def check(self, actor: Actor) -> None:
        if actor.error is not None and not isinstance(actor.error, StoreUnavailable):
            raise AssertionError("a process failed") from actor.error

    def teardown(self) -> None:
        actors = list(self.world.actors)
        while self.world.actors:
            for actor in list(self.world.actors):
                self.world.turn(actor)
            self.world.clock.advance(max(0, min(60, self.world.spare_s())))
        for actor in actors:
            self.check(actor)
        self.whole()
        self.everything_goes_in_the_end()

    def everything_goes_in_the_end(self) -> None:
        """When nobody needs anything, three collections leave nothing."""
        for _ in range(3):
            self.world.clock.advance(KEEP_S)
            blobs = StoreBlobs(self.world.memory, clock=self.world.clock)
            collect(blobs, in_use=self.in_use, keep_s=KEEP_S, grace_s=GRACE_S)
        self.whole()
        left = {stored.key.partition("/")[2] for stored in self.world.memory.list("snapshots")}
        assert left == self.in_use
        if not left:
            assert not [*self.world.memory.list("units"), *self.world.memory.list("packs")]


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase
