"""What is said of an environment before and after it is captured."""

from __future__ import annotations

import msgspec

from serverless_gpu.client.launch.snapshot_environment import found_text, taken_text
from serverless_gpu.environment.capture.snapshot_capture import capture_remarks
from serverless_gpu.environment.documents import (
    FileRow,
    Root,
    SnapshotMember,
    SnapshotOrigin,
    make_snapshot,
    unit_address,
)
from serverless_gpu.environment.scan.scan import Scan
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from serverless_gpu.environment.service_messages import CapturedEnvironment, CaptureDone
from tests.support.environment.hostile import PYTHON
from tests.support.golden import golden

MB = 1_000_000
TAKEN = CaptureDone(
    number=1, snapshot="a" * 64, size=3 * MB, files=20, units=4, code_bytes=MB, sent_units=1, sent_bytes=2000, ms=40
)


def scan(*left_out: str, **sizes: int) -> Scan:
    """Return a scan of a project in /p with files of these sizes, and a library in /p/.venv."""
    rows = tuple(FileRow(f"site/{name}", "f", size, name.encode()) for name, size in sorted(sizes.items()))
    member = SnapshotMember(
        address=unit_address(rows), kind="code", name="p", size=sum(sizes.values()), files=len(sizes)
    )
    roots = (Root(kind="own", members=()), Root(kind="code", members=(member,)))
    facts = SnapshotOrigin(originals=("/p/.venv", "/p"), left_out=left_out)
    source = LocalUnit(rows=rows, files=tuple(f"/p/{name}" for name in sizes))
    return Scan(snapshot=make_snapshot(PYTHON, roots, facts), sources={member.address: source})


def test_large_code_is_said_with_its_largest_files_and_what_to_do() -> None:
    (said,) = capture_remarks(None, scan(a=300 * MB, b=200 * MB, c=100 * MB, d=1 * MB, train=10))

    assert said.startswith("the code in /p is 601.0 MB; largest: a 300.0 MB, b 200.0 MB, c 100.0 MB. ")
    assert ".sgpuignore" in said
    assert capture_remarks(None, scan(a=99 * MB)) == ()


def test_code_that_grows_is_said_once_for_each_100_mb() -> None:
    before = scan(a=250 * MB).snapshot

    assert capture_remarks(before, scan(a=260 * MB)) == ()
    (said,) = capture_remarks(before, scan(a=250 * MB, b=300 * MB))
    assert golden("environment.remarks.550-mb-300") in said


def test_what_of_the_code_stays_behind_is_said_once() -> None:
    many = [f"/p/{name}: it is a device" for name in "abcd"]
    inside = "/p/.venv/x: a link"

    assert capture_remarks(None, scan(inside, "/elsewhere: y")) == ()
    assert capture_remarks(None, scan(*many, inside)) == (
        *(f"left out: {sentence}" for sentence in many[:3]),
        golden("environment.remarks.left-out-more"),
    )
    assert capture_remarks(scan(*many[:3]).snapshot, scan(*many)) == (f"left out: {many[3]}",)


def test_what_git_ignores_is_said_once_however_many_there_are() -> None:
    first, later = (f"/p/: {count} files that git ignores (a, b, …)" for count in (7, 8))
    unasked = f"{later}; which of them it tracks is not known: its index cannot be read"

    assert capture_remarks(None, scan(first)) == (f"left out: {first}",)
    assert capture_remarks(scan(first).snapshot, scan(later)) == ()
    assert capture_remarks(scan(first).snapshot, scan(unasked)) == (f"left out: {unasked}",)


def test_the_first_capture_says_all_and_later_ones_what_is_new() -> None:
    first = CapturedEnvironment(number=1, first=True)
    changed = CapturedEnvironment(
        number=1, first=False, changes=("six 1.17.0 added", "helper.py changed"), remarks=("a remark",)
    )

    assert [line.partition(" (")[0] for line in found_text(first)] == ["capturing the environment"]
    assert found_text(changed) == [golden("environment.remarks.environment-changed-six"), "a remark"]
    said = taken_text(TAKEN, first)
    assert said.startswith(
        "environment aaaaaaaaaaaa: 3.0 MB in 20 files and 4 units, including 1.0 MB of the project's code; "
    )
    assert taken_text(TAKEN, changed) == golden("environment.remarks.environment-aaaaaaaaaaaa-units")


def test_nothing_is_said_where_nothing_changed() -> None:
    nothing = CapturedEnvironment(number=1, first=False)

    assert found_text(nothing) == []
    assert taken_text(msgspec.structs.replace(TAKEN, sent_units=0, sent_bytes=0), nothing) == ""
