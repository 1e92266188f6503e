"""The store of a server does what every store does, over a real connection, also when that cuts or alters bytes."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.environment.stores.collection import collect
from serverless_gpu.environment.stores.condemned_objects import COLLECTOR, CONDEMNED, read_condemned
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from serverless_gpu.environment.stores.server_store import ServedStore
from serverless_gpu.environment.stores.store_urls import is_remote, open_store
from serverless_gpu.errors import (
    EnvironmentMissing,
    EnvironmentRejected,
    HashMismatch,
    InvalidValue,
    NotAllowed,
    NotFound,
    ServerStorageFull,
    StorageError,
    StoreUnavailable,
)
from serverless_gpu.server.storage import environment_store as environment_store_module
from serverless_gpu.server.storage.server_stores import DiskLimits, Storage, open_storage
from serverless_gpu.testing.stores import StoreConformance, empty_unit, pack_key
from serverless_gpu.wire.blobs import DigestList
from serverless_gpu.wire.connection import Connection
from tests.support.environment.environments_in_stores import capture, make_pack, make_unit, snapshot_of
from tests.support.environment.servers import Line, cut, flip
from tests.support.golden import golden
from tests.support.server.listening import app_of, listening
from tests.support.small_disks import small_disk

CONTENT = b"print('the project of another member')"


def stored_in(directory: Path, *, kept_free_bytes: int = 0) -> Storage:
    return open_storage(directory, "", {}, clock=SystemClock(), room=DiskLimits(kept_free_bytes=kept_free_bytes))


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return stored_in(tmp_path)


@pytest.fixture
def server(storage: Storage) -> Iterator[str]:
    with listening(app_of(storage)) as url:
        yield url


_opened: list[ServedStore] = []


def served(url: str, role: str = "operator") -> ServedStore:
    _opened.append(ServedStore(f"sgpu+{url}", role, bound_s=10.0))
    return _opened[-1]


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


class TestServed(StoreConformance):
    """Over HTTP, in front of a directory."""

    @pytest.fixture
    def store(self, server: str) -> Store:
        """Return the store of a test."""
        return served(server)


def test_it_is_opened_by_its_name(server: str) -> None:
    store = open_store(f"sgpu+{server}", {}, token="member")
    assert isinstance(store, ServedStore)
    _opened.append(store)
    store.put({pack_key(b"x"): b"x"})
    assert store.get(pack_key(b"x")) == b"x"
    assert is_remote(store.url)
    for url in ("sgpu+http://", "sgpu+http://host/path", "sgpu+ftp://host", "sgpu+http://user@host"):
        with pytest.raises(InvalidValue):
            open_store(url, {}, token="member")


def test_a_capture_and_a_restore_pass_through_it(server: str) -> None:
    snapshot = capture(StoreBlobs(served(server, "member")), b"one", b"two")
    documents = StoreBlobs(served(server, "agent"))
    assert documents.read_snapshot(snapshot.address) == snapshot
    for address in snapshot.addresses():
        unit = documents.read_unit(address)
        for digest in unit.packs:
            assert documents.read_pack(digest)


# what the server refuses ----------------------------------------------------------------------------------------------


def test_members_put_and_get_by_name_and_only_operators_list_delete_and_note(server: str) -> None:
    member, operator = served(server, "member"), served(server, "operator")
    member.put({pack_key(b"x"): b"x"})
    assert member.get(pack_key(b"x")) == b"x"
    for call in (
        lambda: list(member.list("packs")),
        lambda: list(member.list("gc")),
        lambda: member.delete([pack_key(b"x")]),
        lambda: member.put({"gc/condemned": b"everything"}),
    ):
        with pytest.raises(StoreUnavailable, match=r"refuses|operators"):
            call()
    assert [stored.key for stored in operator.list("packs")] == [pack_key(b"x")]
    agent = served(server, "agent")
    assert agent.get(pack_key(b"x")) == b"x"
    for refused in (lambda: agent.put({pack_key(b"y"): b"y"}), lambda: served(server, "viewer").get(pack_key(b"x"))):
        with pytest.raises(StoreUnavailable, match="may not"):
            refused()
    with pytest.raises(StoreUnavailable):
        served(server, "nobody").get(pack_key(b"x"))


def served_directory(storage: Storage) -> Store:
    return storage.environments._store


def stored_and_condemned(storage: Storage) -> Snapshot:
    """Put a member's environment, and have all of it condemned."""
    store = served_directory(storage)
    secret = capture(StoreBlobs(store), CONTENT)
    assert collect(StoreBlobs(store), keep_s=0, grace_s=0).condemned.snapshots == 1
    return secret


def test_22A4_a_member_cannot_learn_the_keys_of_condemned_objects(storage: Storage, server: str) -> None:
    secret = stored_and_condemned(storage)
    listed = {entry.key for entry in read_condemned(served_directory(storage)).entries}
    assert f"snapshots/{secret.address}" in listed
    for role in ("member", "agent"):
        connection = Connection(server, role)
        for path in (
            "/environments/list/gc",
            "/environments/list/snapshots",
            "/environments/objects/gc/condemned",
            "/environments/objects/gc%2Fcondemned",
            f"/environments/objects/{COLLECTOR}{'0' * 32}",
        ):
            with pytest.raises(NotAllowed, match="operators"):
                connection.get(path)
        connection.close()
    operator = served(server, "operator")
    assert [stored.key for stored in operator.list("gc")] == [CONDEMNED]
    assert operator.get(CONDEMNED)


def test_22A4_a_capture_is_told_about_the_keys_that_it_names(storage: Storage, server: str) -> None:
    secret = stored_and_condemned(storage)
    unit = next(iter(secret.addresses()))
    member = served(server, "member")
    kept = pack_key(b"kept")
    member.put({kept: b"kept"})
    assert member.condemned([f"units/{unit}", kept, "packs/" + "0" * 64]) == {f"units/{unit}"}
    assert member.condemned([]) == frozenset()
    assert not member.is_collecting()
    served_directory(storage).put({COLLECTOR + "1" * 32: b""})
    assert member.is_collecting()
    with pytest.raises(EnvironmentRejected):
        member.condemned(["gc"])
    assert StoreBlobs(member).missing_units([unit]) == (unit,), "a capture puts it again"


def test_22A4_a_capture_through_a_server_rescues_what_was_condemned(storage: Storage, server: str) -> None:
    secret = stored_and_condemned(storage)
    again = capture(StoreBlobs(served(server, "member")), CONTENT)
    assert again == secret
    store = served_directory(storage)
    for _ in range(2):
        collect(StoreBlobs(store), grace_s=0)
    assert StoreBlobs(store).read_snapshot(secret.address) == secret


def test_an_attempt_reads_no_environment(server: str) -> None:
    with pytest.raises(StoreUnavailable, match="attempt"):
        served(server, "attempt").get(pack_key(b"x"))


def test_nothing_comes_in_that_is_not_what_its_name_says(storage: Storage) -> None:
    unit, content = empty_unit("real")
    other, _ = empty_unit("other")
    snapshot = snapshot_of(make_unit(b"1", "a" * 64))
    put = storage.environments.put
    for key, data in (
        (pack_key(b"x"), b"y"),
        (other, content),
        (unit, content[:-1]),
        (unit, b""),
        (unit, make_pack(b"no unit")),
        ("snapshots/" + "b" * 64, encode(snapshot)),
    ):
        with pytest.raises(HashMismatch):
            put(key, data)
        assert storage.environments.present([key]) == frozenset()
    for key in ("packs/../../etc/passwd", "gc/condemned/..", "", "units"):
        with pytest.raises(EnvironmentRejected):
            put(key, b"")
    with pytest.raises(NotAllowed):
        put("gc/condemned", b"")


def test_a_unit_needs_its_packs(storage: Storage) -> None:
    pack = make_pack(b"content")
    unit = make_unit(b"content", blake3(pack).hexdigest())
    key = f"units/{unit.address}"
    with pytest.raises(EnvironmentMissing):
        storage.environments.put(key, encode(unit))
    storage.environments.put(pack_key(pack), pack)
    storage.environments.put(key, encode(unit))


def test_a_unit_that_is_whole_is_not_replaced_by_one_that_points_elsewhere(storage: Storage) -> None:
    good, bad = make_pack(b"content"), make_pack(b"harmful")
    environments = storage.environments
    for pack in (good, bad):
        environments.put(pack_key(pack), pack)
    unit, harmful = (make_unit(b"content", blake3(pack).hexdigest()) for pack in (good, bad))
    key = f"units/{unit.address}"
    assert harmful.address == unit.address
    environments.put(key, encode(unit))
    with pytest.raises(EnvironmentRejected, match="cannot be stored"):
        environments.put(key, encode(harmful))
    assert b"".join(environments.read(key)) == encode(unit)
    other = make_pack(b"content" + b"more")
    environments.put(pack_key(other), other)
    block = msgspec.structs.replace(unit.blocks[0], length=len(other), size=11)
    elsewhere = msgspec.structs.replace(unit, packs=(blake3(other).hexdigest(),), blocks=(block,))
    environments.put(key, encode(elsewhere))
    assert b"".join(environments.read(key)) == encode(unit)
    environments.delete([pack_key(good)])  # now it is of no use to anybody
    environments.put(key, encode(elsewhere))
    assert b"".join(environments.read(key)) == encode(elsewhere)


def test_a_snapshot_that_was_removed_is_missed_before_the_run_waits(storage: Storage, server: str) -> None:
    snapshot = capture(StoreBlobs(served(server)), b"one").address
    storage.environments.need(snapshot)
    storage.environments.need(snapshot)
    storage.environments.delete([f"snapshots/{snapshot}"])
    with pytest.raises(EnvironmentMissing):
        storage.environments.need(snapshot)


def test_objects_are_read_in_pieces(storage: Storage, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_store_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr("serverless_gpu.server.environments.PIECE_BYTES", 1000)
    data = random.Random(3).randbytes(4_500)
    store = served(server)
    store.put({pack_key(data): data})
    assert store.get(pack_key(data)) == data
    for start, length in ((0, 1000), (0, 1001), (500, 3000), (3_500, 1000), (3_500, 5_000), (4_000, 500), (0, 2000)):
        assert store.get(pack_key(data), start, length) == data[start : start + length], (start, length)
    with pytest.raises(NotFound):
        storage.environments.read(pack_key(b"absent"))


# F40, F42, F43 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [cut, flip])
def test_F42_what_was_cut_or_flipped_on_its_way_up_is_sent_again_and_never_used(server: str, harm: object) -> None:
    data = random.Random(4).randbytes(500_000)
    with Line(server, up=harm, times=2) as line:  # type: ignore[arg-type]  # the parameter is one of two functions
        store = served(line.url)
        store.put({pack_key(data): data})
        assert line.harmed == 2
    assert served(server).get(pack_key(data)) == data


def test_F42_a_line_that_alters_everything_is_named_and_nothing_is_there(server: str) -> None:
    data = random.Random(5).randbytes(50_000)
    with Line(server, up=flip, times=1000) as line, pytest.raises(StoreUnavailable, match="arrived altered"):
        served(line.url).put({pack_key(data): data})
    assert list(served(server).list("packs")) == []


@pytest.mark.parametrize("harm", [cut, flip])
def test_F42_what_was_cut_or_flipped_on_its_way_down_is_read_again(server: str, harm: object) -> None:
    data = random.Random(6).randbytes(500_000)
    StoreBlobs(served(server)).write_pack(data)
    with Line(server, down=harm) as line:  # type: ignore[arg-type]  # as above
        assert StoreBlobs(served(line.url)).read_pack(blake3(data).hexdigest()) == data
        assert line.harmed == 1


def test_F42_parts_that_were_cut_or_flipped_are_refused_and_an_upload_goes_on_with_what_is_missing(
    server: str,
) -> None:
    parts = [random.Random(number).randbytes(30_000) for number in range(4)]
    digests = tuple(blake3(part).hexdigest() for part in parts)
    with Line(server, up=flip) as line:
        connection = Connection(line.url, "attempt")
        with pytest.raises(HashMismatch):
            connection.put(f"/blobs/{digests[0]}", parts[0])
        connection.put(f"/blobs/{digests[1]}", parts[1])
        missing = connection.ask("POST", "/blobs/missing", DigestList(digests=digests), answer=DigestList)
        assert missing.digests == (digests[0], *digests[2:])
        connection.close()


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk("6m") as place:
        yield place


def test_F40_a_full_disk_is_said_before_bytes_nothing_is_half_there_and_it_goes_on_later(disk: Path) -> None:
    data = random.Random(9).randbytes(3_000_000)
    digest = blake3(data).hexdigest()
    with listening(app_of(stored_in(disk))) as url:
        connection = Connection(url, "member")
        filler = disk / "filler"
        filler.write_bytes(b"x" * 4_000_000)
        with pytest.raises(ServerStorageFull, match=golden("server.served_store.mb-write-mb")):
            connection.put(f"/blobs/{digest}", data)
        with pytest.raises(StorageError, match="no disk space"):
            served(url, "member").put({pack_key(data): data})
        assert [path for path in disk.rglob("*") if path.is_file()] == [filler]
        # Room for one copy, and not for that which is being stored.
        filler.write_bytes(b"x" * 1_000_000)
        with pytest.raises(ServerStorageFull):
            connection.put(f"/blobs/{digest}", data)
        assert [path for path in disk.rglob("*") if path.is_file()] == [filler]
        filler.unlink()
        connection.put(f"/blobs/{digest}", data)
        store = DirectoryStore(disk / "blobs")
        assert [stored.key for stored in store.list("packs")] == [f"packs/{digest}"]
        assert store.get(f"packs/{digest}") == data
        connection.close()


def test_F40_a_body_of_unknown_length_ends_where_it_does_not_fit(disk: Path) -> None:
    (disk / "filler").write_bytes(b"x" * 3_000_000)
    with listening(app_of(stored_in(disk))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as line:
            head = f"PUT /api/v1/blobs/{'a' * 64} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer member\r\n"
            head += "Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            line.sendall(head.encode())
            for _ in range(6):
                line.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            line.sendall(b"0\r\n\r\n")
            assert b"503" in line.recv(4096).split(b"\r\n")[0]
    assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler"]


def test_an_upload_that_breaks_off_leaves_nothing(server: str, tmp_path: Path) -> None:
    host, port = server.removeprefix("http://").split(":")
    data = random.Random(10).randbytes(3_000_000)
    with socket.create_connection((host, int(port))) as line:
        head = f"PUT /api/v1/blobs/{blake3(data).hexdigest()} HTTP/1.1\r\nHost: {host}\r\n"
        head += "Authorization: Bearer member\r\nContent-Type: application/octet-stream\r\n"
        line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:2_000_000])
    connection = Connection(server, "member")
    connection.put(f"/blobs/{blake3(data).hexdigest()}", data)
    connection.close()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
