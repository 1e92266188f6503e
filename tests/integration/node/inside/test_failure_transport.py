"""Exceptions from a rank to the caller: told, pickled where that is proven, rebuilt, and never replaced by another."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from serverless_gpu.client.runs import outcome
from serverless_gpu.errors import RemoteError
from tests.support.golden import golden
from tests.support.node.rank_process import run_rank


def test_the_first_line_of_a_ranks_traceback_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "users_code.py").write_text("def train():\n    raise ValueError('theirs')\n")
    (tmp_path / "broken_import.py").write_text("1 / 0\n")
    text = run_rank(
        "import json, users_code\n"
        "def described(function):\n"
        "    call.dump_call(sys.argv[2], function=function, args=[], kwargs={}, sources={})\n"
        "    try: return failure.describe(ValueError(call.load_call(sys.argv[2]).function()))\n"
        "    except Exception as error: return failure.describe(error)\n"
        "print(json.dumps(described(users_code.train)['traceback']))\n"
        "def later():\n    pass\n"
        "sys.modules['broken_import'] = module = type(sys)('broken_import')\n"
        "module.__spec__ = 1; later.__module__ = 'broken_import'; module.later = later\n"
        "call.dump_call(sys.argv[2], function=later, args=[], kwargs={}, sources={})\n"
        "del sys.modules['broken_import']\n"
        "try: call.load_call(sys.argv[2])\n"
        "except Exception as error:\n"
        "    error.__traceback__ = error.__traceback__.tb_next  # as if this program were the rank's own loop\n"
        "    print(json.dumps(failure.describe(error)['traceback']))\n",
        tmp_path / "call.pkl",
        path=tmp_path,
    )
    raised_there, imported_there = (json.loads(line).splitlines() for line in text.splitlines())
    assert raised_there[-3:] == [
        golden("node.failure_transport.file-users-code", tmp_path=tmp_path),
        "    raise ValueError('theirs')",
        "ValueError: theirs",
    ]
    # Neither the frames that loaded the call nor those of the import below them.
    assert imported_there[:2] == [
        golden("node.failure_transport.traceback-most-recent"),
        golden("node.failure_transport.file-broken-import", tmp_path=tmp_path),
    ]


RAISE = """
import json, remote_only
try:
    remote_only.fail()
except Exception as error:
    with open(sys.argv[2], "wb") as file:
        print(file.write(failure.pickle_exception(error)) > 0)
    print(json.dumps(failure.describe(error)))
"""


def test_F57_a_class_that_cannot_be_imported_here_becomes_a_remote_error(tmp_path: Path) -> None:
    (tmp_path / "remote_only.py").write_text(
        "class Special(Exception):\n    pass\n\ndef fail():\n    error = Special('only there')\n"
        "    error.add_note('look at the data')\n    raise error\n"
    )
    path = tmp_path / "error.pkl"
    written, described = run_rank(RAISE, path, path=tmp_path).splitlines()
    assert written == "True"
    back = outcome.rebuild_exception(json.loads(described), str(path), rank=0, host="h", run_id="r", log_path="/l")
    assert isinstance(back, RemoteError)
    assert str(back).startswith("rank 0 raised remote_only.Special: only there\nhint: ")
    assert golden("node.failure_transport.module-named-remote") in back.hint
    assert back.__notes__ == [
        golden("node.failure_transport.look-data"),
        golden("node.failure_transport.rank-host-run"),
    ]
    assert golden("node.failure_transport.file-remote-only", tmp_path=tmp_path) in str(back.__cause__)


def test_F57_the_same_class_is_caught_by_its_type_when_it_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote_only.py").write_text(
        "class Special(Exception):\n    def __init__(self, a, b):\n        super().__init__(a)\n        self.b = b\n\n"
        "def fail():\n    raise Special('there', 'and here')\n"
    )
    path = tmp_path / "error.pkl"
    _, described = run_rank(RAISE, path, path=tmp_path).splitlines()
    monkeypatch.syspath_prepend(tmp_path)
    back = outcome.rebuild_exception(json.loads(described), str(path), rank=0, host="h", run_id="r", log_path="/l")
    assert type(back) is sys.modules.pop("remote_only").Special and vars(back)["b"] == "and here"
