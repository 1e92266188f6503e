"""Which interpreters may go on in another environment, and why others may not."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.environment.documents import (
    Facts,
    Generated,
    Interpreter,
    Member,
    Root,
    Snapshot,
    make_snapshot,
)
from serverless_gpu.environment.restore.fitting import Loaded, changed_units, fits, row_of

PYTHON = Interpreter(implementation="cpython", version="3.11.7", abi="cpython-311-x86_64-linux-gnu", platform="linux")
NUMPY = Member(address="a" * 64, kind="distribution", name="numpy", version="2.0", modules=("numpy",))
TOY = Member(address="b" * 64, kind="distribution", name="toy", version="1.0", modules=("toy",))
CODE = Member(address="c" * 64, kind="code", name="project", modules=("train", "calendar"))
LOADED = Loaded(names=frozenset({"numpy", "calendar", "sys"}), files=frozenset({"/view/numpy/__init__.py"}))


def snapshot(*members: Member, code: Member = CODE, **changes: object) -> Snapshot:
    own = msgspec.structs.replace(Root(kind="own", members=members), **changes)
    return make_snapshot(PYTHON, (own, Root(kind="code", members=(code,), before=True)), Facts())


OLD = snapshot(NUMPY, TOY)


def newer(member: Member, version: str = "", **changes: object) -> Member:
    changed = msgspec.structs.replace(member, address="d" * 64, **changes)
    return msgspec.structs.replace(changed, version=version or member.version)


def test_the_same_environment_fits() -> None:
    assert fits(LOADED, OLD, OLD, (), ()) == ""
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
    assert fits(LOADED, OLD, new, used=(NUMPY.address,), hooks=()) == ""
    assert changed_units(OLD, new)


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (snapshot(newer(NUMPY, "2.1"), TOY), "numpy 2.0, which it has loaded, is 2.1 now"),
        (snapshot(newer(NUMPY), TOY), "numpy 2.0, which it has loaded, has changed"),
        (snapshot(TOY), "numpy 2.0, which it has loaded, is not there any more"),
        (
            snapshot(NUMPY, TOY, newer(TOY, name="shadow", modules=("calendar",))),
            "shadow 1.0 brings calendar, which it has loaded from elsewhere",
        ),
        (
            snapshot(NUMPY, TOY, generated=(Generated(path="site/editable.pth", text="{{sgpu:1}}"),)),
            "editable.pth is another one",
        ),
        (
            make_snapshot(PYTHON, (*OLD.roots, Root(kind="library", members=())), Facts()),
            "other directories are on its path",
        ),
        (
            make_snapshot(msgspec.structs.replace(PYTHON, version="3.12.1"), OLD.roots, Facts()),
            "its interpreter is cpython 3.12.1, the warm one 3.11.7",
        ),
    ],
)
def test_what_was_loaded_must_be_the_same(new: Snapshot, why: str) -> None:
    assert fits(LOADED, OLD, new, used=(NUMPY.address,), hooks=()) == why


def test_code_that_runs_at_start_must_be_the_same() -> None:
    hooked = newer(TOY, name="hook", modules=())
    why = "hook 1.0 runs code when an interpreter starts"
    assert fits(LOADED, OLD, snapshot(NUMPY, TOY, hooked), (), hooks=(hooked.address,)) == why
    assert fits(LOADED, snapshot(NUMPY, TOY, hooked), OLD, (), hooks=(hooked.address,)) == why


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
