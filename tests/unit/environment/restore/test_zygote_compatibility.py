"""Which interpreters may go on in another environment, and why others may not."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.environment.documents import (
    Generated,
    Interpreter,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    make_snapshot,
)
from serverless_gpu.environment.restore.interpreters import LoadedModules, UnitFindings, changed_units, fits, row_of
from tests.support.golden import golden

PYTHON = Interpreter(implementation="cpython", version="3.11.7", abi="cpython-311-x86_64-linux-gnu", platform="linux")
NUMPY = SnapshotMember(address="a" * 64, kind="distribution", name="numpy", version="2.0", modules=("numpy",))
TOY = SnapshotMember(address="b" * 64, kind="distribution", name="toy", version="1.0", modules=("toy",))
CODE = SnapshotMember(address="c" * 64, kind="code", name="project", modules=("train", "calendar"))
LOADED = LoadedModules(names=frozenset({"numpy", "calendar", "sys"}), files=frozenset({"/view/numpy/__init__.py"}))


def snapshot(*members: SnapshotMember, code: SnapshotMember = CODE, **changes: object) -> Snapshot:
    own = msgspec.structs.replace(Root(kind="own", members=members), **changes)
    return make_snapshot(PYTHON, (own, Root(kind="code", members=(code,), before=True)), SnapshotOrigin())


OLD = snapshot(NUMPY, TOY)


def asked(new: Snapshot, old: Snapshot = OLD, **seen: object) -> str:
    """Ask, with units that hold what their members say."""
    roots = (*old.roots, *new.roots)
    names = {member.address: member.modules for root in roots for member in root.members}
    return fits(LOADED, old, new, UnitFindings(**{"names": names, **seen}))  # type: ignore[arg-type]  # written down by hand


def newer(member: SnapshotMember, version: str = "", **changes: object) -> SnapshotMember:
    changed = msgspec.structs.replace(member, address="d" * 64, **changes)
    return msgspec.structs.replace(changed, version=version or member.version)


def test_the_same_environment_fits() -> None:
    assert asked(OLD) == ""
    assert changed_units(OLD, OLD) == frozenset()


@pytest.mark.parametrize(
    "new",
    [
        snapshot(NUMPY),
        snapshot(NUMPY, newer(TOY, "2.0")),
        snapshot(NUMPY, TOY, newer(TOY, name="other", modules=("other",))),
        snapshot(NUMPY, TOY, code=newer(CODE)),
    ],
    ids=["removed", "another version", "added", "code that has the name of a loaded module"],
)
def test_what_was_never_loaded_may_change(new: Snapshot) -> None:
    assert asked(new, used=(NUMPY.address,)) == ""
    assert changed_units(OLD, new)


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (snapshot(newer(NUMPY, "2.1"), TOY), "numpy 2.0, which the warm interpreter has loaded, is 2.1 now"),
        (snapshot(newer(NUMPY), TOY), "numpy 2.0, which the warm interpreter has loaded, has changed"),
        (snapshot(TOY), "numpy 2.0, which the warm interpreter has loaded, is missing now"),
        (
            snapshot(NUMPY, TOY, newer(TOY, name="shadow", modules=("calendar",))),
            "shadow 1.0 provides calendar, which the warm interpreter has loaded from elsewhere",
        ),
        (
            snapshot(NUMPY, TOY, generated=(Generated(path="site/editable.pth", text="{{sgpu:1}}"),)),
            "editable.pth has changed",
        ),
        (
            make_snapshot(PYTHON, (*OLD.roots, Root(kind="library", members=())), SnapshotOrigin()),
            "sys.path of the new environment has different directories",
        ),
        (
            make_snapshot(msgspec.structs.replace(PYTHON, version="3.12.1"), OLD.roots, SnapshotOrigin()),
            "the environment needs cpython 3.12.1, but the warm interpreter is 3.11.7",
        ),
    ],
)
def test_what_was_loaded_must_be_the_same(new: Snapshot, why: str) -> None:
    assert asked(new, used=(NUMPY.address,)) == why


def test_code_that_runs_at_start_must_be_the_same() -> None:
    hooked = newer(TOY, name="hook", modules=())
    hooks = {hooked.address: "an interpreter starts"}
    why = "hook 1.0 runs code when an interpreter starts"
    assert asked(snapshot(NUMPY, TOY, hooked), hooks=hooks) == why
    assert asked(OLD, snapshot(NUMPY, TOY, hooked), hooks=hooks) == why


@pytest.mark.parametrize(
    ("file", "row"),
    [
        ("/view/lib/python3.11/site-packages/numpy/__init__.py", (0, "site/numpy/__init__.py")),
        ("/view/share/data.txt", (0, "prefix/share/data.txt")),
        ("/view/roots/2/lib/python3.11/site-packages/toy.py", (2, "site/toy.py")),
        ("/view/code/1/pkg/train.py", (1, "site/pkg/train.py")),
        ("/usr/lib/python3.11/os.py", None),
        ("/viewer/a.py", None),
    ],
)
def test_which_row_a_file_of_a_tree_is(file: str, row: tuple[int, str] | None) -> None:
    assert row_of(OLD, "/view", file) == row


def test_which_row_a_file_is_without_a_global_lock() -> None:
    free = msgspec.structs.replace(PYTHON, version="3.13.1", abi="cpython-313t-x86_64-linux-gnu")
    threaded = make_snapshot(free, OLD.roots, SnapshotOrigin())
    file = "/view/lib/python3.13t/site-packages/numpy/core.so"
    assert row_of(threaded, "/view", file) == (0, "site/numpy/core.so")


def test_what_a_unit_brings_is_what_is_in_it_whatever_the_snapshot_says() -> None:
    shadow = newer(TOY, name="", kind="unowned", modules=())
    why = asked(snapshot(NUMPY, TOY, shadow), names={shadow.address: {"numpy"}})
    assert why == golden("environment.fitting.distribution-owns-brings")


def test_libraries_that_are_not_known_may_be_any() -> None:
    unknown = msgspec.structs.replace(LOADED, libraries_known=False)
    assert fits(unknown, OLD, snapshot(NUMPY), UnitFindings()) == golden("environment.fitting.known-libraries-warm")
