"""One member cannot spoil what others capture: units are verified, a snapshot's address covers what a restore does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.documents import (
    Snapshot,
    SnapshotOrigin,
    Unit,
    make_snapshot,
    snapshot_address,
    snapshot_address_1,
    unit_address,
)
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.restore import RestoreMethod, restore
from serverless_gpu.environment.snapshot_validation import check_snapshot
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.environment.stores.repair import ContentMismatch, check_content, repair_units
from serverless_gpu.environment.stores.server_store import ServedStore
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, EnvironmentProblem, EnvironmentRejected
from serverless_gpu.server.storage.environment_store import ContentChecks
from serverless_gpu.server.storage.server_stores import open_storage
from serverless_gpu.testing import FakeClock
from tests.integration.environment.stores.conftest import BUCKET
from tests.support.environment.environments_in_stores import PYTHON, digest_of, make_pack, make_unit, snapshot_of
from tests.support.environment.made_environments import Made
from tests.support.environment.servers import variables
from tests.support.golden import golden
from tests.support.server.listening import app_of, listening

replace = msgspec.structs.replace
CONTENT = b"value = 'honest'\n"


class Team:
    """A server, and what its members and nodes open."""

    def __init__(self, url: str, own: Store) -> None:
        self.url = url
        self.own = own
        """The store as the server sees it; an earlier version of the server let more into it."""
        self.opened: list[ServedStore] = []

    def store(self, token: str) -> ServedStore:
        self.opened.append(ServedStore(f"sgpu+{self.url}", token))
        return self.opened[-1]


@pytest.fixture(params=["directory", "bucket"])
def team(request: pytest.FixtureRequest, prefix: str, tmp_path: Path) -> Iterator[Team]:
    environ, url = {}, str(tmp_path / "store")
    if request.param == "bucket":
        environ = variables(request.getfixturevalue("moto_url"))
        url = f"s3://{BUCKET}/{prefix}"
    (tmp_path / "server").mkdir()
    storage = open_storage(tmp_path / "server", url, environ, clock=SystemClock())
    with listening(app_of(storage)) as server:
        team = Team(server, open_store(url, environ))
        yield team
        for store in team.opened:
            store.close()


def poisoned(unit: Unit, store: Store) -> Unit:
    """Put a pack of other bytes of the same size into a store; return the unit with its address that points there."""
    pack = make_pack(b"x" * sum(row.size for row in unit.rows))
    store.put({f"packs/{digest_of(pack)}": pack})
    block = replace(unit.blocks[0], length=len(pack))
    return replace(unit, packs=(digest_of(pack),), blocks=(block,))


def put_honest(store: Store) -> Unit:
    pack = make_pack(CONTENT)
    unit = make_unit(CONTENT, digest_of(pack))
    store.put({f"packs/{digest_of(pack)}": pack})
    store.put({f"units/{unit.address}": encode(unit)})
    return unit


def test_22A5_a_unit_whose_packs_hold_something_else_is_refused_and_the_honest_one_comes_in(team: Team) -> None:
    mallory, alice = team.store("member"), team.store("member")
    bad = poisoned(make_unit(CONTENT, "0" * 64), mallory)
    with pytest.raises(
        EnvironmentRejected, match=re.escape(golden("environment.shared_by_a_team.cannot-stored-packs"))
    ):
        mallory.put({f"units/{bad.address}": encode(bad)})
    assert not alice.present([f"units/{bad.address}"]), "so whoever captures sends it"
    unit = put_honest(alice)
    assert (unit.address, StoreBlobs(alice).read_unit(unit.address)) == (bad.address, unit)
    with pytest.raises(EnvironmentRejected):
        mallory.put({f"units/{bad.address}": encode(bad)})
    assert StoreBlobs(alice).read_unit(unit.address) == unit


def test_22A5_an_honest_unit_replaces_one_that_an_earlier_server_let_in(team: Team) -> None:
    bad = poisoned(make_unit(CONTENT, "0" * 64), team.own)
    team.own.put({f"units/{bad.address}": encode(bad)})
    unit = put_honest(team.store("member"))
    assert StoreBlobs(team.own).read_unit(bad.address) == unit


def test_22A5_an_honest_unit_of_an_earlier_server_stays_beside_another_layout(team: Team) -> None:
    old = put_honest(team.own)
    more = make_pack(CONTENT + b"\n" * 9)
    again = replace(old, packs=(digest_of(more),), blocks=(replace(old.blocks[0], length=len(more), size=26),))
    member = team.store("member")
    member.put({f"packs/{digest_of(more)}": more})
    member.put({f"units/{old.address}": encode(again)})
    assert StoreBlobs(team.own).read_unit(old.address) == old


def test_22A5_a_node_has_a_poisoned_unit_removed_and_the_next_capture_heals_it(team: Team, tmp_path: Path) -> None:
    made = Made(StoreBlobs(team.own))
    snapshot = made.simple("alpha")
    (address,) = snapshot.addresses()
    honest = StoreBlobs(team.own).read_unit(address)
    bad = poisoned(honest, team.own)
    team.own.put({f"units/{address}": encode(bad)})
    with pytest.raises(EnvironmentCorrupt, match=r"stored content|compressed block") as caught:
        fetch(snapshot, team.store("agent"), tmp_path / "node")
    assert golden("environment.shared_by_a_team.removed-store-units", address=address[:12]) in caught.value.hint
    member = StoreBlobs(team.store("member"))
    assert member.missing_units([address]) == (address,)
    member.write_unit(honest)
    fetch(snapshot, team.store("agent"), tmp_path / "node")


def test_22A5_repair_believes_nobody(team: Team) -> None:
    unit = put_honest(team.own)
    other = poisoned(make_unit(b"y" * 40, "0" * 64, name="other"), team.own)
    team.own.put({f"units/{other.address}": encode(other)})
    removed = repair_units(StoreBlobs(team.store("member")), [unit.address, other.address, "0" * 64])
    assert removed == (f"units/{other.address}",)
    assert team.own.present([f"units/{unit.address}", f"packs/{unit.packs[0]}"])
    assert repair_units(StoreBlobs(team.store("member")), [unit.address]) == ()


def test_22A5_a_pack_that_rots_in_the_store_is_removed_when_its_unit_is_put_again(team: Team) -> None:
    unit = put_honest(team.own)
    pack = f"packs/{unit.packs[0]}"
    team.own.put({pack: b"z" * unit.blocks[0].length})
    with pytest.raises(EnvironmentMissing, match=re.escape(golden("environment.shared_by_a_team.packs-altered-lie"))):
        team.store("member").put({f"units/{unit.address}": encode(unit)})
    assert not team.own.present([pack, f"units/{unit.address}"])
    put_honest(team.store("member"))


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_22A5_a_poisoned_unit_in_a_store_of_ones_own_is_found_by_its_content(tmp_path: Path, kind: str) -> None:
    store = MemoryStore() if kind == "memory" else DirectoryStore(tmp_path / "store")
    snapshot = Made(StoreBlobs(store)).simple("alpha")
    (address,) = snapshot.addresses()
    store.put({f"units/{address}": encode(poisoned(StoreBlobs(store).read_unit(address), store))})
    with pytest.raises(EnvironmentCorrupt) as caught:
        fetch(snapshot, store, tmp_path / "node")
    assert golden("environment.shared_by_a_team.removed-store-units", address=address[:12]) in caught.value.hint
    assert not store.present([f"units/{address}"])


def large_unit(*, blocks: int = 3) -> tuple[Unit, dict[str, bytes]]:
    """Return a unit of one file in several blocks, a small and an empty one, and its packs."""
    store = MemoryStore()
    piece = 4 * 1024 * 1024
    content = b"".join(bytes([number]) * piece for number in range(blocks)) + b"end"
    unit = Made(StoreBlobs(store)).piece({"site/large.bin": content, "site/small.py": "x = 1\n", "site/empty": ""}).unit
    packs = {stored.key.partition("/")[2]: store.get(stored.key) for stored in store.list("packs")}
    return unit, packs


def test_22A5_files_of_several_blocks_are_compared_to_their_end() -> None:
    unit, packs = large_unit()
    read: list[str] = []

    def reader(digest: str, length: int) -> bytes:
        read.append(digest)
        return packs[digest][:length]

    check_content(unit, reader)
    assert sorted(read) == sorted(set(unit.packs)), "each pack is read once"
    for number, row in enumerate(unit.rows):
        if row.size:
            rows = (*unit.rows[:number], replace(row, sha256=b"\1" * 32), *unit.rows[number + 1 :])
            with pytest.raises(ContentMismatch, match=row.path):
                check_content(replace(unit, rows=rows, address=unit_address(rows)), reader)
    with pytest.raises(ContentMismatch, match="cannot be read"):
        check_content(unit, lambda digest, length: b"no frame" * 100)


def test_22A5_blocks_that_jump_between_packs_are_not_read_again_and_again() -> None:
    contents = [b"%03d" % number for number in range(60)]
    frames = [make_pack(content) for content in contents]
    store = MemoryStore()
    unit = make_unit(contents[0], "0" * 64)
    rows = tuple(make_unit(content, "0" * 64, name=f"m{content.decode()}").rows[0] for content in contents)
    packs = [b"".join(frames[side::2]) for side in (0, 1)]
    blocks, places, offsets = [], [], [0, 0]
    for number, frame in enumerate(frames):
        side = number % 2
        blocks.append(replace(unit.blocks[0], pack=side, offset=offsets[side], length=len(frame), size=3))
        places.append(replace(unit.places[0], block=number))
        offsets[side] += len(frame)
    jumping = Unit(
        address=unit_address(rows),
        rows=rows,
        packs=tuple(digest_of(pack) for pack in packs),
        blocks=tuple(blocks),
        places=tuple(places),
    )
    store.put({f"packs/{digest_of(pack)}": pack for pack in packs})
    with pytest.raises(ContentMismatch, match="alternate between"):
        check_content(jumping, lambda digest, length: store.get(f"packs/{digest}", 0, length))


def test_22A5_a_unit_is_verified_once_for_all_who_send_it() -> None:
    unit, packs = large_unit()
    reads: list[str] = []

    def read(digest: str, length: int) -> bytes:
        reads.append(digest)
        return packs[digest][:length]

    checks = ContentChecks(read)
    for _ in range(3):
        checks.check(encode(unit), lambda: unit)
    assert len(reads) == len(unit.packs)


def fetch(snapshot: Snapshot, store: Store, root: Path) -> str:
    return restore(
        snapshot.address, StoreBlobs(store), UnitCache(root, clock=FakeClock()), way=RestoreMethod(mode="links")
    ).tree


# --- snapshots ---------------------------------------------------------------------------------------------------


def two_units(store: Store) -> Snapshot:
    units = []
    for name in ("one", "two"):
        content = f"name = {name!r}\n".encode()
        pack = make_pack(content)
        units.append(make_unit(content, digest_of(pack), name=name))
        store.put({f"packs/{digest_of(pack)}": pack})
        store.put({f"units/{units[-1].address}": encode(units[-1])})
    return snapshot_of(
        *units, facts=SnapshotOrigin(captured_ns=1, originals=("/home/alice/venv",), prefix="/home/alice/venv")
    )


def reordered(snapshot: Snapshot) -> Snapshot:
    (root,) = snapshot.roots
    return replace(snapshot, roots=(replace(root, members=root.members[::-1]),))


def with_member(snapshot: Snapshot, **changes: object) -> Snapshot:
    (root,) = snapshot.roots
    return replace(snapshot, roots=(replace(root, members=(replace(root.members[0], **changes), *root.members[1:])),))


def with_facts(snapshot: Snapshot, **changes: object) -> Snapshot:
    return replace(snapshot, facts=replace(snapshot.facts, **changes))


MEANINGS: dict[str, Callable[[Snapshot], Snapshot]] = {
    "order": reordered,
    "kind": lambda snapshot: with_member(snapshot, kind="unowned"),
    "name": lambda snapshot: with_member(snapshot, name="aaa"),
    "size": lambda snapshot: with_member(snapshot, size=0),
    "files": lambda snapshot: with_member(snapshot, files=7),
    "modules": lambda snapshot: with_member(snapshot, modules=("os",)),
    "originals": lambda snapshot: with_facts(snapshot, originals=("/home/mallory",)),
    "prefix": lambda snapshot: with_facts(snapshot, prefix="/"),
    "python": lambda snapshot: with_facts(snapshot, python="/home/mallory/python"),
    "notes": lambda snapshot: with_facts(snapshot, notes=({"site/a-1.dist-info/INSTALLER": "evil"},)),
    "glibc": lambda snapshot: replace(snapshot, interpreter=replace(snapshot.interpreter, glibc="9.9")),
}


@pytest.mark.parametrize("meaning", MEANINGS)
def test_22A6_whatever_a_restore_acts_on_is_covered_by_the_address(meaning: str) -> None:
    snapshot = two_units(MemoryStore())
    other = MEANINGS[meaning](snapshot)
    assert snapshot_address(other) != snapshot.address
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.shared_by_a_team.address-lists"))):
        check_snapshot(other)


def test_22A6_a_member_cannot_put_another_meaning_under_an_address(team: Team) -> None:
    alice, mallory = team.store("member"), team.store("member")
    snapshot = two_units(alice)
    for other in MEANINGS.values():
        with pytest.raises(EnvironmentProblem):
            mallory.put({f"snapshots/{snapshot.address}": encode(other(snapshot))})
    StoreBlobs(alice).write_snapshot(snapshot)
    assert StoreBlobs(alice).read_snapshot(snapshot.address) == snapshot


def test_22A6_the_first_snapshot_of_an_address_stays_and_is_young_again(team: Team) -> None:
    alice, mallory = team.store("member"), team.store("member")
    snapshot = two_units(alice)
    StoreBlobs(alice).write_snapshot(snapshot)
    first = next(iter(team.own.list("snapshots")))
    other = with_facts(snapshot, captured_ns=2, loaded=(("site/one.py",),), left_out=("something else",))
    check_snapshot(other)
    StoreBlobs(mallory).write_snapshot(other)
    assert StoreBlobs(alice).read_snapshot(snapshot.address) == snapshot
    assert next(iter(team.own.list("snapshots"))).put_ns >= first.put_ns


def test_22A6_a_snapshot_that_was_altered_in_the_store_is_replaced(team: Team) -> None:
    snapshot = two_units(team.own)
    team.own.put({f"snapshots/{snapshot.address}": b"rotten"})
    StoreBlobs(team.store("member")).write_snapshot(snapshot)
    assert StoreBlobs(team.own).read_snapshot(snapshot.address) == snapshot


def version_1(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, version=1, address=snapshot_address_1(snapshot.interpreter, snapshot.roots))


def test_22A6_snapshots_of_version_1_stay_usable_and_the_first_of_them_stays(team: Team, tmp_path: Path) -> None:
    old = version_1(Made(StoreBlobs(team.own)).simple("alpha", "beta"))
    team.own.put({f"snapshots/{old.address}": encode(old)})
    assert "site-packages" in str(next(Path(fetch(old, team.store("agent"), tmp_path / "node")).rglob("alpha")))
    other = with_facts(old, originals=("/home/mallory",))
    team.store("member").put({f"snapshots/{old.address}": encode(other)})
    assert StoreBlobs(team.own).read_snapshot(old.address) == old


def test_22A6_a_snapshot_of_version_1_is_compared_with_its_units_when_it_comes_in(team: Team) -> None:
    old = version_1(two_units(team.own))
    member = team.store("member")
    for meaning in ("order", "size", "files"):
        with pytest.raises(EnvironmentRejected, match=golden("environment.shared_by_a_team.units-order-snapshot")):
            member.put({f"snapshots/{old.address}": encode(MEANINGS[meaning](old))})
    member.put({f"snapshots/{old.address}": encode(old)})
    assert StoreBlobs(team.own).read_snapshot(old.address) == old


def test_22A6_members_get_their_order_when_a_snapshot_is_made() -> None:
    snapshot = two_units(MemoryStore())
    again = make_snapshot(PYTHON, reordered(snapshot).roots, snapshot.facts)
    assert again == snapshot
