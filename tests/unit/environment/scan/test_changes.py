"""What differs between two snapshots, as sentences."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.environment.documents import (
    FileRow,
    Generated,
    Interpreter,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    make_snapshot,
    snapshot_address_1,
)
from serverless_gpu.environment.scan.changes import Change, FileChange, compare, compare_rows, with_files
from tests.support.golden import golden

PYTHON = Interpreter(implementation="cpython", version="3.11.7", abi="cpython-311", platform="linux-x86_64")


def distribution(name: str, version: str, address: str = "") -> SnapshotMember:
    return SnapshotMember(address=address or f"{name}{version}", kind="distribution", name=name, version=version)


TORCH = distribution("torch", "2.12.0")
LOOSE = SnapshotMember(address="loose", kind="unowned")
OTHER_PYTHON = Interpreter(implementation="cpython", version="3.12.1", abi="x", platform="y")
OTHER_CODE = SnapshotMember(address="x", kind="code", name="project")
CODE = SnapshotMember(address="code", kind="code", name="project")


def snapshot(
    *members: SnapshotMember, python: Interpreter = PYTHON, code: SnapshotMember = CODE, **generated: str
) -> Snapshot:
    texts = tuple(Generated(path=f"site/{name}.pth", text=text) for name, text in generated.items())
    roots = (Root(kind="own", members=members, generated=texts), Root(kind="code", members=(code,), before=True))
    return make_snapshot(python, roots, SnapshotOrigin())


BEFORE = snapshot(TORCH, LOOSE)


@pytest.mark.parametrize(
    ("after", "sentences"),
    [
        (snapshot(TORCH, LOOSE), []),
        (snapshot(distribution("torch", "2.13.0"), LOOSE), ["torch 2.12.0 → 2.13.0"]),
        (snapshot(distribution("torch", "2.12.0", "other"), LOOSE), ["torch 2.12.0 edited by hand"]),
        (snapshot(LOOSE, TORCH, distribution("six", "1")), ["six 1 added"]),
        (snapshot(LOOSE), ["torch 2.12.0 removed"]),
        (snapshot(TORCH, distribution("torch", "2.11"), LOOSE), ["torch 2.12.0 → 2.11, 2.12.0"]),
        (snapshot(TORCH), ["files of no distribution removed"]),
        (
            snapshot(TORCH, SnapshotMember(address="x", kind="unowned")),
            ["files of no distribution changed"],
        ),
        (snapshot(TORCH, LOOSE, code=OTHER_CODE), ["project code project changed"]),
        (snapshot(TORCH, LOOSE, tool="{{sgpu:1}}\n"), ["tool.pth added"]),
        (
            snapshot(TORCH, LOOSE, python=OTHER_PYTHON),
            ["Python changed: 3.11 → 3.12", "ABI changed: cpython-311 → x", "platform changed: linux-x86_64 → y"],
        ),
    ],
)
def test_what_differs_is_said(after: Snapshot, sentences: list[str]) -> None:
    assert [change.sentence() for change in compare(BEFORE, after)] == sentences


def test_another_order_of_the_same_is_said() -> None:
    after = make_snapshot(PYTHON, tuple(reversed(BEFORE.roots)), SnapshotOrigin())

    assert [one.sentence() for one in compare(BEFORE, after)] == [golden("environment.changes.sys-path-changed")]


def test_22A6_what_else_an_address_covers_is_said() -> None:
    old = msgspec.structs.replace(BEFORE, version=1, address=snapshot_address_1(PYTHON, BEFORE.roots))
    moved = make_snapshot(PYTHON, BEFORE.roots, SnapshotOrigin(originals=("/elsewhere",)))
    noted = make_snapshot(PYTHON, BEFORE.roots, SnapshotOrigin(python="/usr/bin/python3"))

    assert [one.sentence() for after in (moved, noted) for one in compare(BEFORE, after)] == [
        golden("environment.changes.environment-changed-same"),
        golden("environment.changes.environment-changed-same-units"),
    ]
    (one,) = compare(old, BEFORE)
    assert one.sentence() == golden("environment.changes.environment-changed-nothing")


def test_files_are_named_up_to_a_bound() -> None:
    files = tuple(f"torch/{name}.py" for name in "abcde")
    change = Change(kind="distribution", name="torch", what="edited", detail="2.12.0", files=files)

    assert change.sentence() == golden("environment.changes.torch-12-torch")


def test_rows_of_two_versions() -> None:
    a, b, c, changed = FileRow("site/a"), FileRow("site/b"), FileRow("site/c"), FileRow("site/b", "x")

    assert compare_rows([a, b], [changed, c]) == (
        FileChange(path="site/a", what="removed"),
        FileChange(path="site/b", what="changed"),
        FileChange(path="site/c", what="added"),
    )


def test_a_changed_unit_is_said_file_by_file() -> None:
    def row(path: str, content: bytes) -> FileRow:
        return FileRow(f"site/{path}", "f", 1, content)

    before = [row("edited.py", b"1"), row("gone.py", b"2"), row("mended.py", b"3"), row("same.py", b"4")]
    after = [row("back.py", b"8"), row("edited.py", b"5"), row("mended.py", b"6"), row("new.py", b"7"), before[3]]
    installed = {"site/mended.py": b"6", "site/back.py": b"8", "site/edited.py": b"1", "site/gone.py": b"2"}
    rich = Change(kind="distribution", name="rich", what="edited", detail="15.0.0")
    code = Change(kind="code", name="project", what="edited")

    assert [one.sentence() for one in with_files(rich, before, after, installed)] == [
        golden("environment.changes.rich-15-edited"),
        golden("environment.changes.rich-15-new"),
        golden("environment.changes.rich-15-gone"),
        golden("environment.changes.rich-15-back"),
    ]
    assert [one.sentence() for one in with_files(code, before, after, {})] == [
        "edited.py, mended.py changed",
        "back.py, new.py added",
        "gone.py removed",
    ]
    assert with_files(rich, before, before, {}) == (rich,)
