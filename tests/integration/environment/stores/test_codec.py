"""A document that would take much memory is refused before anything is made of it (2.20)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from serverless_gpu.environment.compression import compress
from serverless_gpu.environment.documents import Snapshot, SnapshotOrigin, make_snapshot
from serverless_gpu.environment.stores.codec import SNAPSHOT_BYTES_MAX, decode, encode
from serverless_gpu.errors import EnvironmentRejected
from tests.support.environment.hostile import PYTHON, file, member_of, snapshot, unit
from tests.support.golden import golden

COUNT = 30_000_000
MEMORY_MB_MAX = 200

BOMB = """
import sys
from pathlib import Path
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.stores.codec import decode
from serverless_gpu.errors import EnvironmentRejected
def most_kb():
    # Not ru_maxrss: that begins with what the process had which started this one.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = most_kb()
for length in sys.argv[1:]:
    try:
        decode(sys.stdin.buffer.read(int(length)), Snapshot, "it")
        print("decoded")
    except EnvironmentRejected as error:
        print(error.message)
print((most_kb() - before) // 1024)
"""

MARK = "@@ bomb @@"
EMPTY_LIST, EMPTY_MAP, EMPTY_TEXT, TEXT = b"\x90", b"\x80", b"\xa0", b"\xa1a"


def listed(item: bytes, count: int = COUNT) -> bytes:
    """Return a list of one thing, again and again."""
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def mapped(count: int = COUNT // 4) -> bytes:
    """Return a map of texts of one letter, which nobody forbids to be the same."""
    return b"\xdf" + count.to_bytes(4, "big") + (TEXT + TEXT) * count


def with_bomb(where: str, bomb: bytes) -> bytes:
    """Return a snapshot, as it would be stored, that is right but for one of its fields."""
    member = {"address": "0" * 64, "kind": "distribution"}
    root: dict[str, object] = {"kind": "own", "members": [member]}
    facts: dict[str, object] = {}
    document: dict[str, object] = {
        "address": "0" * 64,
        "interpreter": PYTHON,
        "roots": [root],
        "facts": facts,
        "version": 1,
    }
    holder = {"member": member, "root": root, "facts": facts, "": document}[where.rpartition(".")[0]]
    holder[where.rpartition(".")[2]] = MARK  # type: ignore[index]  # each is a dict with texts as keys
    content = msgspec.msgpack.encode(document)
    return compress(content.replace(msgspec.msgpack.encode(MARK), bomb), 3)


def bombs() -> Iterator[tuple[str, bytes]]:
    """Yield fields, and what is in each instead; one at a time, for each takes 30 MB here."""
    yield "roots", listed(EMPTY_MAP)
    yield "root.members", listed(EMPTY_MAP)
    yield "root.generated", listed(EMPTY_MAP)
    yield "member.modules", listed(TEXT, COUNT // 2)
    yield "facts.originals", listed(EMPTY_TEXT)
    yield "facts.notes", listed(EMPTY_MAP)
    yield "facts.notes", b"\x91" + mapped()
    yield "facts.loaded", listed(EMPTY_LIST)
    yield "facts.loaded", b"\x91" + listed(TEXT, COUNT // 2)
    yield "facts.variables", listed(TEXT, COUNT // 2)
    yield "facts.left_out", listed(TEXT, COUNT // 2)
    yield "unknown", listed(listed(EMPTY_LIST, 10), COUNT // 20)
    yield "facts.notes", b"\x91" * COUNT


def test_a_bomb_in_any_field_of_a_snapshot_takes_no_memory() -> None:
    wheres, stored = zip(*((where, with_bomb(where, bomb)) for where, bomb in bombs()), strict=True)
    assert max(map(len, stored)) < 100_000
    command = [sys.executable, "-c", BOMB, *(str(len(data)) for data in stored)]
    done = subprocess.run(command, input=b"".join(stored), capture_output=True, check=True, timeout=60)
    *said, grown = done.stdout.decode().splitlines()
    refused = golden("environment.codec.more-1000000-values")
    assert list(zip(wheres, said, strict=True)) == [(where, refused) for where in wheres]
    assert int(grown) < MEMORY_MB_MAX


def test_a_snapshot_of_too_many_bytes_is_not_decoded() -> None:
    with pytest.raises(
        EnvironmentRejected, match=golden("environment.codec.holds-more-bytes", SNAPSHOT_BYTES_MAX=SNAPSHOT_BYTES_MAX)
    ):
        decode(with_bomb("facts.notes", listed(EMPTY_MAP, 100_000_000)), Snapshot, "it")


@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_a_length_that_is_a_lie_is_found_before_anything_is_made_of_it(length: bytes) -> None:
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.codec.cannot-read-ends"))):
        decode(compress(b"\x92" + length + bytes(2_000_000)), Snapshot, "it")


def test_a_large_snapshot_passes_and_what_would_not_be_read_is_not_written() -> None:
    good = member_of(unit(file("site/a")))
    members = tuple(msgspec.structs.replace(good, address=f"{n:064x}", modules=("a", "b" * 40)) for n in range(10_000))
    loaded = tuple(f"site/pkg/module_{n}.py" for n in range(200_000))
    large = snapshot(
        *members, facts=SnapshotOrigin(loaded=(loaded,), notes=({"ä" * 300: "x" * 70_000},), captured_ns=2**60)
    )
    assert decode(encode(large), Snapshot, "it") == large
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.codec.more-1000000-values-2"))):
        encode(snapshot(good, facts=SnapshotOrigin(loaded=(("a",) * 1_000_001,))))
    with pytest.raises(
        EnvironmentRejected, match=golden("environment.codec.most", SNAPSHOT_BYTES_MAX=SNAPSHOT_BYTES_MAX)
    ):
        encode(make_snapshot(PYTHON, (), SnapshotOrigin(left_out=("a" * SNAPSHOT_BYTES_MAX,))))
