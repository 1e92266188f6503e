"""Conformance tests for built-in and third-party environment stores.

    class TestMine(StoreConformance):
        @pytest.fixture
        def store(self): return MyStore(...)

Each test starts with a new, empty store. The tests neither sleep nor depend on the store's clock. The tests store only
valid units and packs, because a store may validate its objects.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from blake3 import blake3

from serverless_gpu.environment.documents import FileRow, Unit, unit_address
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.errors import EnvironmentRejected

HOSTILE_KEYS = (
    "",
    "packs",
    "packs/",
    "packs/../../etc/passwd",
    "/etc/passwd",
    "../packs/" + "a" * 64,
    "packs/" + "a" * 63,
    "packs/" + "a" * 65,
    "packs/" + "A" * 64,
    "packs/" + "a" * 64 + "\n",
    "packs/" + "a" * 64 + "/..",
    "packs//" + "a" * 63,
    "packs/" + "\x00" + "a" * 63,
    "secrets/" + "a" * 64,
    "gc/../packs/" + "a" * 64,
    "gc/anything",
)


def pack_key(data: bytes) -> str:
    """Return the key under which a store keeps the given bytes as a pack."""
    return f"packs/{blake3(data).hexdigest()}"


def empty_unit(name: str) -> tuple[str, bytes]:
    """Return the key and the bytes of a unit with one empty directory."""
    rows = (FileRow(f"site/{name}", "d"),)
    unit = Unit(address=unit_address(rows), rows=rows, packs=(), blocks=(), places=())
    return f"units/{unit.address}", encode(unit)


class StoreConformance:
    """Conformance tests for the store that the fixture `store` provides."""

    def test_what_was_put_can_be_got(self, store: Store) -> None:
        """The store returns exactly the stored bytes, including empty content and large memoryviews."""
        for data in (b"", b"\0", b"half\r\n\xff" * 1000, bytes(range(256)) * 40_000):
            store.put({pack_key(data): memoryview(data)})
            assert store.get(pack_key(data)) == data

    def test_what_is_not_there_is_a_key_error(self, store: Store) -> None:
        """The error for a missing object names its key."""
        key = pack_key(b"never put")
        for read in (lambda: store.get(key), lambda: store.get(key, 3, 5), lambda: store.get("gc/condemned")):
            assert _raised(read, KeyError)
        assert key in str(_raised(lambda: store.get(key), KeyError))

    def test_ranges(self, store: Store) -> None:
        """A range read stops at the end of the object and is empty beyond the end."""
        data = bytes(range(256)) * 4
        key = pack_key(data)
        store.put({key: data})
        for start, length in ((0, 10), (17, 300), (1000, 24), (0, 1024), (0, None), (17, None), (1023, 1), (5, 0)):
            end = None if length is None else start + length
            assert store.get(key, start, length) == data[start:end], (start, length)
        for start, length in ((1000, 25), (1000, 100_000), (1024, 1), (5000, 10), (1024, None), (5000, None)):
            assert store.get(key, start, length) == data[start:], (start, length)

    def test_ranges_that_no_object_has_are_refused(self, store: Store) -> None:
        """The store refuses a negative start, a negative length and an excessive length."""
        store.put({pack_key(b"x"): b"x"})
        for start, length in ((-1, 1), (0, -1), (0, 1 << 40)):
            assert _raised(partial(store.get, pack_key(b"x"), start, length), EnvironmentRejected)

    def test_putting_again_replaces(self, store: Store) -> None:
        """A `put` replaces longer, shorter and equal content."""
        for data in (b"first", b"second, which is longer", b"3", b"3"):
            store.put({"gc/condemned": data})
            assert store.get("gc/condemned") == data
        assert [stored.size for stored in store.list("gc")] == [1]

    def test_many_are_put_at_once(self, store: Store) -> None:
        """A single `put` accepts any mix of small, large, new and existing objects, and an empty mapping."""
        objects: dict[str, bytes | memoryview] = {pack_key(b"%d" % number): b"%d" % number for number in range(150)}
        objects |= {pack_key(data): memoryview(data) for data in (b"", bytes(range(256)) * 8_000)}
        objects |= dict([empty_unit("many")]) | {"gc/condemned": b"list"}
        store.put({"gc/condemned": b"before"})
        store.put(objects)
        for key, data in objects.items():
            assert store.get(key) == data
        store.put({})
        assert len(list(store.list("packs"))) == 152

    def test_present_answers_for_many_at_once(self, store: Store) -> None:
        """`present` returns exactly the existing keys, and no keys for an empty query."""
        there = [pack_key(b"%d" % number) for number in range(40)]
        for number, key in enumerate(there):
            store.put({key: b"%d" % number})
        absent = [pack_key(b"absent %d" % number) for number in range(40)]
        assert store.present(there + absent) == frozenset(there)
        assert store.present(absent) == frozenset()
        assert store.present(()) == frozenset()
        assert store.present([there[0].replace("packs", "units")]) == frozenset()

    def test_list_says_what_is_there(self, store: Store) -> None:
        """A listing contains each object of a kind once, with its size and time."""
        sizes = {pack_key(b"x" * size): size for size in range(30)}
        for key, size in sizes.items():
            store.put({key: b"x" * size})
        unit, content = empty_unit("listed")
        store.put({unit: content})
        store.put({"gc/condemned": b"list"})
        listed = list(store.list("packs"))
        assert len(listed) == len(sizes)
        assert {stored.key: stored.size for stored in listed} == sizes
        assert all(stored.put_ns > 0 for stored in listed)
        assert [stored.key for stored in store.list("units")] == [unit]
        assert list(store.list("snapshots")) == []
        assert [stored.key for stored in store.list("gc")] == ["gc/condemned"]

    def test_delete_is_idempotent(self, store: Store) -> None:
        """Deleting a missing object raises no error."""
        keys = [pack_key(b"%d" % number) for number in range(20)]
        for number, key in enumerate(keys):
            store.put({key: b"%d" % number})
        for _ in range(2):
            store.delete([*keys[:15], pack_key(b"never put")])
            assert store.present(keys) == frozenset(keys[15:])
        assert _raised(lambda: store.get(keys[0]), KeyError)
        store.put({keys[0]: b"0"})
        assert store.get(keys[0]) == b"0"
        store.delete(())

    def test_keys_lead_nowhere_else(self, store: Store) -> None:
        """Every call refuses an invalid key before it reads or writes."""
        for key in HOSTILE_KEYS:
            for call in (
                lambda key=key: store.get(key),
                lambda key=key: store.put({key: b""}),
                lambda key=key: store.present([key]),
                lambda key=key: store.delete([key]),
                lambda key=key: list(store.list(key)),
            ):
                if key != "packs":  # The kind "packs" is a valid argument of `list`.
                    assert _raised(call, EnvironmentRejected), key

    def test_writers_of_one_key_at_once(self, store: Store) -> None:
        """With concurrent writers, each reader gets the complete content of one writer."""
        versions = [bytes([number]) * (200_000 + number) for number in range(4)]
        store.put({"gc/condemned": versions[0]})
        seen: list[bytes] = []

        def write(version: bytes) -> None:
            for _ in range(5):
                store.put({"gc/condemned": version})

        def read() -> None:
            seen.extend(store.get("gc/condemned") for _ in range(10))

        with ThreadPoolExecutor(len(versions) + 1) as pool:
            for done in [*(pool.submit(write, version) for version in versions), pool.submit(read)]:
                done.result()
        assert set(seen) <= set(versions)
        assert len(seen) == 10
        assert store.get("gc/condemned") in versions

    def test_a_url_names_the_store(self, store: Store) -> None:
        """The store's URL has the form that users enter, without credentials."""
        assert "://" in store.url
        assert "@" not in store.url

    def test_free_bytes_is_a_number_or_unknown(self, store: Store) -> None:
        """`free_bytes` returns None if the store does not know its free space."""
        free = store.free_bytes()
        assert free is None or free >= 0


def _raised(call: Callable[[], object], kind: type[Exception]) -> Exception | None:
    try:
        call()
    except kind as error:
        return error
    return None
