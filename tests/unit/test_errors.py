"""The exception tree: every class explains itself, has a code of its own, and survives a pickle."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator

import pytest

from serverless_gpu import errors
from serverless_gpu.errors import RankCrashed, RunError, ServerlessGpuError, UsageError
from tests.support.golden import golden


def subtree(root: type[ServerlessGpuError]) -> Iterator[type[ServerlessGpuError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from subtree(child)


TREE = list(dict.fromkeys(subtree(ServerlessGpuError)))
every_class = pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)


def test_the_tree_is_all_there_is() -> None:
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, BaseException)]
    assert set(found) == set(TREE)


@every_class
def test_a_class_is_drawn_at_the_head_of_the_module(cls: type[ServerlessGpuError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")


@every_class
def test_a_class_explains_itself_and_that_is_its_message(cls: type[ServerlessGpuError]) -> None:
    first = (cls.__dict__.get("__doc__") or "").partition("\n")[0]
    assert first.endswith(".") and len(first) > 10
    assert (str(cls()), cls().hint) == (first, "")


def test_codes_are_unique_and_each_class_has_its_own() -> None:
    codes = [cls.__dict__["code"] for cls in TREE]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


@every_class
def test_a_status_is_an_http_error(cls: type[ServerlessGpuError]) -> None:
    assert 400 <= cls.status < 600
    assert (cls.status < 500) >= issubclass(cls, UsageError)


def test_what_python_would_raise_is_a_base_of_what_we_raise() -> None:
    builtin = {cls.__name__: base.__name__ for cls in TREE for base in cls.__bases__ if base.__module__ == "builtins"}
    assert builtin == {
        "ServerlessGpuError": "Exception",
        "InvalidOption": "TypeError",
        "InvalidValue": "ValueError",
        "ArgumentMismatch": "TypeError",
        "NotDistributable": "TypeError",
        "NotPicklable": "TypeError",
        "RayMissing": "ImportError",
    }
    assert {cls.__name__ for cls in TREE if cls.retryable} == {
        "AgentUnavailable",
        "ServerUnavailable",
        "StoreUnavailable",
    }


def test_a_hint_has_a_line_of_its_own() -> None:
    assert str(UsageError("no", hint="do this")) == golden("common.errors.hint-do")


@every_class
def test_an_error_survives_pickle_and_copy_whole(cls: type[ServerlessGpuError]) -> None:
    error = cls("what happened", hint="what to do")
    if isinstance(error, RunError):
        error = type(error)(
            "what happened", hint="what to do", run_id="r", rank=3, reason="rank_signal", log_tail="last\nlines"
        )
    error.add_note("a note")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        check_same(pickle.loads(pickle.dumps(error, protocol)), error)
    check_same(copy.copy(error), error)
    check_same(copy.deepcopy(error), error)


def check_same(made: ServerlessGpuError, error: ServerlessGpuError) -> None:
    assert type(made) is type(error)
    assert (str(made), made.args, made.__dict__) == (str(error), error.args, error.__dict__)


def test_an_error_of_a_class_with_more_arguments_survives_pickle() -> None:
    check_same(pickle.loads(pickle.dumps(Extended(7))), Extended(7))


class Extended(ServerlessGpuError):
    """An error of somebody else's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}", hint="count")
        self.number = number


def test_a_run_error_tells_where() -> None:
    error = RankCrashed("rank 3 was ended by SIGSEGV", run_id="r", rank=3, reason="rank_signal", log_tail="bye")
    assert error.__dict__ == {
        "message": golden("common.errors.rank-ended-sigsegv"),
        "hint": "",
        "run_id": "r",
        "rank": 3,
        "reason": "rank_signal",
        "log_tail": "bye",
    }
    assert (RunError().run_id, RunError().rank, RunError().reason, RunError().log_tail) == ("", None, "", "")
