"""What is hostile is refused by the name of its path and rule, and what is ordinary passes (2.19, 2.20)."""

from __future__ import annotations

import hashlib
import re
import time

import msgspec
import pytest

from serverless_gpu.environment.documents import (
    BLOCK_BYTES,
    ContentPlace,
    FileRow,
    Generated,
    PackBlock,
    Snapshot,
    SnapshotOrigin,
    Unit,
)
from serverless_gpu.environment.snapshot_validation import check_path, check_snapshot, check_together, check_unit
from serverless_gpu.errors import EnvironmentRejected
from tests.support.environment.hostile import file, hostile_snapshots, hostile_units, link, member_of, snapshot, unit
from tests.support.golden import golden


@pytest.mark.parametrize(("bad", "rule"), [pytest.param(*case[1:], id=case[0]) for case in hostile_units()])
def test_a_hostile_unit_is_refused(bad: Unit, rule: str) -> None:
    with pytest.raises(EnvironmentRejected) as caught:
        check_unit(bad)
    assert rule in str(caught.value)
    assert len(str(caught.value)) < 1000  # a path of a megabyte is not thrown at a terminal


@pytest.mark.parametrize(("bad", "rule"), [pytest.param(*case[1:], id=case[0]) for case in hostile_snapshots()])
def test_a_hostile_snapshot_is_refused(bad: Snapshot, rule: str) -> None:
    with pytest.raises(EnvironmentRejected) as caught:
        check_snapshot(bad)
    assert rule in str(caught.value)


def test_the_error_names_unit_path_and_rule() -> None:
    bad = unit(file("site/a/../b"))
    with pytest.raises(EnvironmentRejected) as caught:
        check_unit(bad)
    assert str(caught.value) == golden("environment.rules.unit-site-name", address=bad.address[:12])


def test_an_ordinary_unit_passes() -> None:
    check_unit(
        unit(
            file("site/pkg/__init__.py", 0),
            file("site/pkg/Größe.txt"),
            file("site/pkg/...", 10),
            file("site/pkg/two words; $(rm)"),
            file("site/" + "a" * 255),
            file("site/" + "/".join("abcdefghij" * 6), 1),
            file("prefix/bin/tool", 9, "x"),
            link("prefix/bin/alias", "tool"),
            link("site/pkg/lib.so", "lib.so.1"),
            link("site/pkg/lib.so.1", "./lib.so.1.2"),
            file("site/pkg/lib.so.1.2"),
            link("site/pkg/data/latest", "../versions/v1"),
            file("site/pkg/versions/v1/x"),
            link("site/pkg/up", ".."),
            FileRow(path="site/pkg/empty", kind="d"),
            file("site/pkg/orphan.pyc"),
            file("site/big", 9 * 1024 * 1024),
        )
    )


def test_an_empty_unit_passes() -> None:
    check_unit(unit(packs=()))


def test_zeros_of_moderate_size_pass() -> None:
    size = 256 * 1024 * 1024
    count = size // BLOCK_BYTES
    blocks = tuple(PackBlock(0, 150 * n, 150, BLOCK_BYTES) for n in range(count))
    check_unit(unit(file("site/zeros.bin", size), blocks=blocks, places=(ContentPlace(0, 0),)))


def test_small_files_share_a_block_and_an_edit_may_leave_bytes_of_it_unused() -> None:
    rows = (file("site/a", 10), file("site/b", 20))
    check_unit(unit(*rows, blocks=(PackBlock(0, 0, 30, 100),), places=(ContentPlace(0, 70), ContentPlace(0, 5))))


def test_an_ordinary_snapshot_passes() -> None:
    whole = snapshot(
        member_of(unit(file("site/a"))),
        generated=[
            Generated(path="site/__editable__.x.pth", text="{{sgpu:0}}/x\n"),
            Generated(path="prefix/bin/tool", text="#!{{sgpu:python}}\n", executable=True),
        ],
        facts=SnapshotOrigin(
            originals=("/home/me/venv/lib/python3.11/site-packages",),
            notes=({"site/a-1.dist-info/INSTALLER": "uv\n", "site/a-1.dist-info/REQUESTED": ""},),
            loaded=(("site/a.py",),),
            variables=("PYTHONPATH",),
        ),
    )
    check_snapshot(whole)


@pytest.mark.parametrize(
    ("path", "row", "rule"),
    [
        ("site/a", file("site/a"), "collides with a unit's path 'site/a'"),
        ("site/A", file("site/a"), "collides with a unit's path 'site/a'"),
        ("site/a/b", file("site/a"), "collides with a unit's path 'site/a'"),
        ("site/a/b", link("site/a", "."), "collides with a unit's path 'site/a'"),
        ("site/a", file("site/a/b/c"), "collides with a unit's directory 'site/a'"),
        ("site/a", FileRow(path="site/a", kind="d"), "collides with a unit's path 'site/a'"),
    ],
)
def test_nothing_is_generated_on_top_of_a_unit(path: str, row: FileRow, rule: str) -> None:
    there = unit(row)
    whole = snapshot(member_of(there), generated=[Generated(path=path, text="")])
    check_snapshot(whole)
    with pytest.raises(EnvironmentRejected, match=rule):
        check_together(whole, {there.address: there})


def test_a_note_does_not_replace_a_file_of_a_unit() -> None:
    there = unit(file("site/a.dist-info/INSTALLER"))
    whole = snapshot(member_of(there), facts=SnapshotOrigin(notes=({"site/a.dist-info/INSTALLER": "x"},)))
    with pytest.raises(EnvironmentRejected, match="INSTALLER"):
        check_together(whole, {there.address: there})


def test_units_may_share_directories_with_what_is_generated() -> None:
    there = unit(file("site/a/b/c"), FileRow(path="prefix/bin", kind="d"))
    whole = snapshot(
        member_of(there), generated=[Generated(path="site/a/b/d", text=""), Generated(path="prefix/bin/x", text="")]
    )
    check_together(whole, {there.address: there})


def test_a_unit_is_as_large_as_the_snapshot_says() -> None:
    there = unit(file("site/a", 5))
    whole = snapshot(msgspec.structs.replace(member_of(there), size=4))
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.rules.those-unit"))):
        check_together(whole, {there.address: there})


def test_a_path_by_itself() -> None:
    check_path("prefix/share/x")
    with pytest.raises(EnvironmentRejected, match="at most 64 names"):
        check_path("site/" + "/".join("a" * 64))


@pytest.mark.slow
def test_checking_a_large_unit_is_linear() -> None:
    digest = hashlib.sha256(b"x").digest()
    rows = tuple(
        FileRow(path=f"site/d{n // 1000:04}/e{n // 50 % 20:02}/f{n % 50:02}", size=1, sha256=digest)
        for n in range(100_000)
    )
    blocks = tuple(PackBlock(0, 100 * n, 100, 1000) for n in range(100))
    large = unit(*rows, blocks=blocks, places=tuple(ContentPlace(n // 1000, n % 1000) for n in range(100_000)))
    before = time.process_time()
    check_unit(large)
    assert time.process_time() - before < 5
