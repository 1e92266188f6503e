"""The moments at which a capture and a collection could do each other harm, one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.stores.base import Stored
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.collection import collect, make_plan
from serverless_gpu.environment.stores.condemned_objects import CONDEMNED, CondemnedEntry, CondemnedList
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import EnvironmentMissing, StoreUnavailable
from serverless_gpu.testing import FakeClock
from tests.support.environment.environments_in_stores import capture
from tests.support.environment.stepped import Actor, World
from tests.support.golden import golden

GRACE_S = 3600
DAY_S = 24 * 3600


class Races:
    """A world with one snapshot that nobody needs any more."""

    def __init__(self) -> None:
        self.world = World()
        self.snapshots: list[Snapshot] = []
        capture(StoreBlobs(self.world.memory, clock=self.world.clock), b"1", b"2")
        self.world.clock.advance(DAY_S)

    def collect(self) -> None:
        collect(StoreBlobs(self.world.memory, clock=self.world.clock), keep_s=DAY_S, grace_s=GRACE_S)

    def start_collection(self) -> Actor:
        def work(actor: Actor) -> None:
            collect(StoreBlobs(actor.store, clock=self.world.clock), keep_s=DAY_S, grace_s=GRACE_S)

        return self.world.start(work, seconds_max=DAY_S)

    def start_capture(self, *contents: bytes) -> Actor:
        def work(actor: Actor) -> None:
            def sleep(_: float) -> None:
                actor.wait()

            self.snapshots.append(capture(StoreBlobs(actor.store, clock=self.world.clock, sleep=sleep), *contents))

        return self.world.start(work, seconds_max=GRACE_S)

    def until(self, actor: Actor, reached: Callable[[], object]) -> None:
        """Go on with a process until something is so."""
        for _ in range(100):
            if reached():
                return
            assert not actor.over, actor.error
            self.world.turn(actor)
        raise AssertionError("that never comes")

    def end(self, actor: Actor) -> None:
        for _ in range(500):
            if not actor.over:
                self.world.turn(actor)

    def has_unit(self) -> bool:
        return bool(list(self.world.memory.list("units")))

    def is_whole(self) -> bool:
        blobs = StoreBlobs(self.world.memory)
        units = [blobs.read_unit(unit) for snapshot in self.snapshots for unit in snapshot.addresses()]
        return all(blobs.read_pack(digest) for unit in units for digest in unit.packs)


@pytest.fixture
def races() -> Races:
    return Races()


def test_a_capture_does_not_rely_on_what_is_about_to_go(races: Races) -> None:
    races.collect()
    races.world.clock.advance(GRACE_S)
    capturing = races.start_capture(b"1")
    for _ in range(3):
        races.world.turn(capturing)
    races.collect()
    races.end(capturing)
    assert capturing.error is None
    assert races.is_whole()


def test_the_date_of_a_sentence_is_when_everybody_could_read_it(races: Races) -> None:
    collecting = races.start_collection()
    races.until(collecting, lambda: collecting.store.next_call == "put" and collecting.store.calls > 5)
    # The list is on its way for as long as a call may take; a capture begins that does not see it, and takes its time.
    races.world.clock.advance(298)
    capturing = races.start_capture(b"1")
    for _ in range(3):
        races.world.turn(capturing)
    races.end(collecting)
    races.world.clock.advance(GRACE_S - 10)
    races.collect()
    races.end(capturing)
    assert capturing.error is None
    assert races.is_whole()


def test_a_list_without_dates_condemns_nobody_for_long(races: Races) -> None:
    collecting = races.start_collection()
    races.until(collecting, lambda: races.world.memory.present([CONDEMNED]))
    races.world.kill(collecting)
    races.world.clock.advance(GRACE_S)
    races.collect()
    assert races.has_unit()
    races.world.clock.advance(GRACE_S)
    races.collect()
    assert not races.has_unit()


def test_a_deletion_that_hangs_makes_captures_wait(races: Races) -> None:
    races.collect()
    races.world.clock.advance(GRACE_S)
    collecting = races.start_collection()
    races.until(collecting, lambda: about_to_delete(collecting))
    capturing = races.start_capture(b"1")
    for _ in range(40):
        races.world.turn(capturing)
    assert not capturing.over  # it has put everything again, and waits
    races.world.clock.advance(299)
    for _ in range(10):
        races.world.turn(capturing)
    assert not capturing.over
    races.end(collecting)
    races.end(capturing)
    # Either way nobody has a snapshot that is not whole.
    assert isinstance(capturing.error, StoreUnavailable)
    assert golden("environment.collection_races.garbage-collection-deleted") in str(capturing.error)
    assert list(races.world.memory.list("snapshots")) == []
    again = races.start_capture(b"1")
    races.end(again)
    assert again.error is None
    assert races.is_whole()


def about_to_delete(actor: Actor) -> bool:
    return actor.store.next_call == "delete" and actor.store.calls > 5  # the first ones clean up behind others


def test_a_snapshot_that_grew_old_unseen_keeps_its_units_as_long_as_it_is_there(races: Races) -> None:
    # It came to need a unit in the moment in which that was condemned, and no collection ran while it was young.
    capturing = races.start_capture(b"1", b"3")
    for _ in range(3):
        races.world.turn(capturing)
    races.collect()
    races.end(capturing)
    assert capturing.error is None
    races.world.clock.advance(DAY_S)
    races.collect()
    assert races.is_whole()
    races.world.clock.advance(GRACE_S)
    races.collect()
    assert [*races.world.memory.list("snapshots"), *races.world.memory.list("units")] == []


@pytest.mark.parametrize("puts", [0, 1], ids=["a pack", "a unit"])
def test_nothing_is_written_that_points_at_what_is_being_deleted(races: Races, puts: int) -> None:
    races.collect()
    races.world.clock.advance(GRACE_S)
    capturing = races.start_capture(b"1")
    races.until(capturing, lambda: capturing.store.next_call == "put" and capturing.store.puts == puts)
    collecting = races.start_collection()
    races.until(collecting, lambda: about_to_delete(collecting))
    races.until(capturing, lambda: capturing.store.puts > puts)
    # It has put it again, and the collection deletes it now.
    races.end(collecting)
    races.end(capturing)
    assert isinstance(capturing.error, StoreUnavailable)
    assert not races.has_unit()
    again = races.start_capture(b"1")
    races.end(again)
    assert again.error is None
    assert races.is_whole()


def test_a_snapshot_that_is_put_while_it_is_deleted_is_not_said_to_be_there(races: Races) -> None:
    races.collect()
    races.world.clock.advance(GRACE_S)
    capturing = races.start_capture(b"1", b"2")
    races.until(capturing, lambda: capturing.store.next_call == "put" and capturing.store.puts == 4)
    collecting = races.start_collection()
    races.until(collecting, lambda: about_to_delete(collecting))
    for _ in range(10):
        races.world.turn(capturing)
    assert not capturing.over
    races.end(collecting)
    races.end(capturing)
    assert isinstance(capturing.error, StoreUnavailable)
    again = races.start_capture(b"1", b"2")
    races.end(again)
    assert again.error is None
    assert races.is_whole()


def test_two_collections_that_meet_both_withdraw_and_the_next_one_works(races: Races) -> None:
    races.collect()
    races.world.clock.advance(GRACE_S)
    first, second = races.start_collection(), races.start_collection()
    while not (first.over and second.over):
        for collecting in (first, second):
            if not collecting.over:
                races.world.turn(collecting)
    assert races.has_unit()
    assert [stored.key for stored in races.world.memory.list("gc")] == [CONDEMNED]
    races.collect()
    assert not races.has_unit()


def stored(name: str, put_ns: int) -> Stored:
    return Stored(f"packs/{name * 64}", 1, put_ns)


def test_what_becomes_of_each_object() -> None:
    now_ns, grace_ns = 1000, 100
    listed = [stored(name, 5) for name in "abcdef0"]
    keys = [one.key for one in listed]
    condemned = CondemnedList(
        entries=(
            CondemnedEntry(keys[0], 900, 5),  # long enough
            CondemnedEntry(keys[1], 901, 5),  # not yet
            CondemnedEntry(keys[2], 900, 4),  # put again since
            CondemnedEntry(keys[3], 0, 5),  # no date
            CondemnedEntry(keys[4], 900, 5),  # needed
            CondemnedEntry("packs/" + "9" * 64, 900, 5),  # gone
            CondemnedEntry(keys[6], 900, 5),  # something that waits points at it
        )
    )
    plan = make_plan(listed, {keys[4]}, {keys[6]}, condemned, now_ns=now_ns, grace_ns=grace_ns)
    assert [one.key for one in plan.deleted] == [keys[0]]
    assert plan.waiting == (condemned.entries[1], condemned.entries[6])
    assert [one.key for one in plan.condemned] == [keys[2], keys[3], keys[5]]
    assert [one.key for one in plan.kept] == [keys[4]]


class Hurried(MemoryStore):
    """A store on which, before one of a capture's calls, somebody collects twice without any grace."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.clock = clock
        self.left: int | None = None

    def count(self) -> None:
        """Count a call of the capture."""
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            for _ in range(2):
                self.clock.advance(1)
                collect(StoreBlobs(self, clock=self.clock), keep_s=0, grace_s=0)

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects."""
        if not any(key.startswith("snapshots/") for key in objects):  # then it is too late, as a moment later
            self.count()
        super().put(objects)

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Look for objects."""
        self.count()
        return super().present(keys)


@given(known=st.booleans(), at=st.integers(0, 12))
@settings(deadline=None)
def test_a_collection_without_grace_lets_no_capture_publish_what_is_not_there(known: bool, at: int) -> None:
    clock = FakeClock()
    store = Hurried(clock)
    if known:
        capture(StoreBlobs(store, clock=clock), b"1", b"2")
        clock.advance(10)
    store.left = at
    try:
        snapshot = capture(StoreBlobs(store, clock=clock), b"1", b"2", b"3")
    except (StoreUnavailable, EnvironmentMissing):
        store.left = None
        snapshot = capture(StoreBlobs(store, clock=clock), b"1", b"2", b"3")
    blobs = StoreBlobs(store, clock=clock)
    for address in blobs.read_snapshot(snapshot.address).addresses():
        for digest in blobs.read_unit(address).packs:
            blobs.read_pack(digest)
