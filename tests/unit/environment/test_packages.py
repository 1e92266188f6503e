"""What is installed in two environments: the same, whatever the project's own code is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serverless_gpu.environment.documents import (
    Packages,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    are_same,
    difference,
    make_snapshot,
    packages_of,
)
from tests.support.environment.environments_in_stores import PYTHON


def member(name: str, version: str = "1", **changes: Any) -> SnapshotMember:
    made = SnapshotMember(address=f"{name}-{version}", kind="distribution", name=name, version=version, modules=(name,))
    return msgspec.structs.replace(made, **changes)


def installed(*members: SnapshotMember, code: str = "mine", python: Any = PYTHON) -> Packages:
    own = Root(kind="own", members=members)
    project = Root(kind="code", members=(SnapshotMember(address=code, kind="code", name="proj"),))
    snapshot: Snapshot = make_snapshot(python, (own, project), SnapshotOrigin())
    return packages_of(snapshot)


TORCH, NUMPY = member("torch", "2.1"), member("numpy", "2.0")
UNOWNED = SnapshotMember(address="loose", kind="unowned")


def test_the_code_may_differ_and_what_brings_nothing_to_import_does_not_count() -> None:
    base = installed(TORCH, NUMPY)
    editable = member("proj", "0.7", modules=())
    assert are_same(base, installed(NUMPY, TORCH, editable, code="another"))
    assert difference(installed(TORCH, NUMPY, editable), base) == ""


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (installed(TORCH), "numpy 2.0 less"),
        (installed(TORCH, member("numpy", "2.1")), "numpy 2.1 more, numpy 2.0 less"),
        (installed(TORCH, NUMPY, UNOWNED), "files of no distribution more"),
        (
            installed(TORCH, NUMPY, *(member(name) for name in "abcdefg")),
            "a 1, b 1, c 1, d 1, e 1 and 2 others more",
        ),
        (
            installed(TORCH, NUMPY, python=msgspec.structs.replace(PYTHON, version="3.12.1")),
            "cpython 3.12 cpython-311-x86_64-linux-gnu linux-x86_64 is not "
            "cpython 3.11 cpython-311-x86_64-linux-gnu linux-x86_64",
        ),
    ],
)
def test_what_differs_is_named(asked: Packages, says: str) -> None:
    base = installed(TORCH, NUMPY)
    assert not are_same(asked, base)
    assert difference(asked, base) == says
