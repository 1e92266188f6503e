"""Each lint finds a planted mistake and leaves the right way alone: the checks themselves can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts.lints import (
    broad_excepts,
    clock,
    inner_imports,
    inside_room,
    links,
    names,
    sentences,
    transactions,
    type_ignores,
    unpickling,
    voice,
)
from scripts.lints.__main__ import LINTS
from scripts.lints.source import parse
from tests.support.golden import golden
from tests.support.paths import REPOSITORY

ROOM = "src/serverless_gpu/node/agent/agent.py"
OPEN = "src/serverless_gpu/client/runs/run.py"
INSIDE = "src/serverless_gpu/node/inside/rank.py"

# lint, path of the file, a bad text, the same thing done right
PLANTED = [
    (unpickling, OPEN, "import pickle\npickle.loads(b'')\n", "import pickle\npickle.dumps(1)\n"),
    (unpickling, OPEN, "import pickle as p\nclass U(p.Unpickler): ...\n", "class U(Unpickler): ...\n"),
    (unpickling, ROOM, "from cloudpickle import load as l\nl(f)\n", "from json import load as l\nl(f)\n"),
    (unpickling, ROOM, "def f():\n    import torch\n    torch.load(p)\n", "import torch\ntorch.save(x, p)\n"),
    (unpickling, ROOM, "import marshal\nmarshal.loads(b'')\n", "import json\njson.loads('')\n"),
    (unpickling, ROOM, "import shelve\nshelve.open('x')\n", "open('x')\n"),
    (unpickling, "src/serverless_gpu/server/a.py", "import pickle\n", "import msgspec\n"),
    (unpickling, "src/serverless_gpu/cli/a.py", "def f():\n    from multiprocessing import Pipe\n", "import os\n"),
    (
        unpickling,
        ROOM,
        "from serverless_gpu.node.inside import payload\n",
        "from serverless_gpu.node.inside import call\n",
    ),
    (unpickling, "examples/x.py", "import torch\ntorch.load(p)\n", "import torch\ntorch.load(p, weights_only=True)\n"),
    (unpickling, "scripts/x.py", "import pickle\nread = pickle.load\n", "import json\nread = json.load\n"),
    (
        transactions,
        "src/serverless_gpu/server/records/runs.py",
        "connection.commit()\n",
        "connection.execute(query)\n",
    ),
    (clock, ROOM, "import time\ntime.time()\n", "import time\ntime.monotonic()\n"),
    (clock, ROOM, "from time import time_ns as now\nnow()\n", "def now() -> int: ...\nnow()\n"),
    (clock, ROOM, "import datetime as d\nd.datetime.now(d.UTC)\n", "import datetime as d\nd.datetime(2026, 1, 1)\n"),
    (clock, ROOM, "from datetime import date\ndate.today()\n", "from datetime import date\ndate(2026, 1, 1)\n"),
    (clock, INSIDE, "import time\ntime.time_ns()\n", "import time\ntime.clock_gettime_ns(time.CLOCK_BOOTTIME)\n"),
    (inner_imports, ROOM, "def f():\n    import json\n", "import json\ndef f(): ...\n"),
    (inner_imports, ROOM, "def f():\n    if x:\n        from . import logs\n", "def f():\n    import numpy.random\n"),
    (
        inner_imports,
        ROOM,
        "class C:\n    async def f(self):\n        from a import b\n",
        "def f():\n    import torch\n",
    ),
    (inside_room, INSIDE, "import msgspec\n", "import json\n"),
    (inside_room, INSIDE, "from ..home import path\n", "from .payload import dump\n"),
    (inside_room, INSIDE, "from serverless_gpu import errors\n", "def f():\n    import torch\n"),
    (inside_room, INSIDE.replace("rank", "a/b"), "from ... import home\n", "from ..payload import dump\n"),
    (inside_room, INSIDE, "import click\n", "import os.path\n"),
    (inside_room, INSIDE, "if x:\n    import click\n", "if TYPE_CHECKING:\n    import click\nelse:\n    import os\n"),
    (voice, OPEN, '"""Whether it is told."""\n', '"""Returns the state."""\n'),
    (voice, OPEN, f'"""{"long " * 26}sentence."""\n', '"""A short sentence. And another one."""\n'),
    (voice, OPEN, f'"""{"x" * 101}"""\n', f'"""{"x" * 100}"""\n'),
    (voice, OPEN, "# Nobody reads it.\n", "# No process reads it.\n"),
    (voice, OPEN, "x = 'whoever asks'\n", "whoever = 1\n"),
    (names, "src/serverless_gpu/node/utils.py", "", ""),
    (names, "src/serverless_gpu/common/paths.py", "", ""),
    (names, "tests/run_helpers.py", "", ""),
    (names, "src/serverless_gpu/server/policies/allowing.py", "", ""),
    (broad_excepts, ROOM, "try: ...\nexcept Exception: ...\n", "try: ...\nexcept OSError: ...\n"),
    (
        broad_excepts,
        ROOM,
        "try: ...\nexcept: ...\n",
        "try: ...\nexcept BaseException:\n    close()\n    raise\n",
    ),
    (
        broad_excepts,
        ROOM,
        "try: ...\nexcept (OSError, Exception):  # noqa: BLE001\n    ...\n",
        "try: ...\nexcept (OSError, Exception):  # noqa: BLE001 - user code may raise anything\n    ...\n",
    ),
    (type_ignores, ROOM, "x = 1  # type: ignore\n", "x = '# type: ignore'\n"),
    (type_ignores, ROOM, "x = 1  # type: ignore[attr]\n", "x = 1  # type: ignore[attr]  # set in C\n"),
    (type_ignores, "tests/test_x.py", "x = 1  # type: ignore[attr]  # noqa: F401\n", "x = 1\n"),
]


@pytest.mark.parametrize(("lint", "path", "bad", "good"), PLANTED)
def test_a_planted_mistake_is_found_and_the_right_way_is_not(lint: ModuleType, path: str, bad: str, good: str) -> None:
    found = list(lint.check(parse(path, bad)))
    assert found
    assert re.match(rf"{re.escape(path)}:\d+: [a-z-]+: .+", str(found[0]))
    good_path = "src/serverless_gpu/node/output/logs.py" if lint is names else path
    assert list(lint.check(parse(good_path, good))) == []


def test_every_lint_is_planted_and_run() -> None:
    assert {lint for lint, *_ in PLANTED} == set(LINTS)


@pytest.mark.parametrize(
    ("lint", "room", "text"),
    [
        (unpickling, "src/serverless_gpu/node/inside/payload.py", "import pickle\npickle.loads(b'')\n"),
        (clock, "src/serverless_gpu/ambient.py", "import time\ntime.time_ns()\n"),
        (inside_room, ROOM, "import msgspec\nfrom ..model import spec\n"),
    ],
)
def test_the_one_room_may_do_it(lint: ModuleType, room: str, text: str) -> None:
    assert list(lint.check(parse(room, text))) == []


def test_an_import_in_a_nested_function_is_reported_once() -> None:
    source = parse(ROOM, "def f():\n    def g():\n        import json\n")
    assert [(found.line, found.rule) for found in inner_imports.check(source)] == [(3, "inner-import")]


def test_broad_excepts_are_counted_per_thousand_lines_of_src() -> None:
    excepts = "try: ...\nexcept Exception: ...  # a reason here\n" * 4
    small = [parse(ROOM, excepts), parse("scripts/x.py", excepts)]
    assert broad_excepts.per_1000_lines(small) == 4.0
    assert broad_excepts.per_1000_lines([*small, parse("src/x.py", "x = 1\n" * 1992)]) == 2.0


def test_a_broken_link_is_found_and_other_links_are_not(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# `X` & y, [z](/docs)!\n[a](docs/a.md#top) [web](https://example.org#no) ![p](<docs/gone.png>)\n"
        "[here](#x--y-z) [gone](#gone)\n"
    )
    page = (
        "[up](../README.md#x--y-z) `[code](no.md)`\n```\n[fenced](no.md)\n# no\n```\n[root](/docs)\n[r]: gone.md\n"
        "# Top\n## Top\n[t](#top-1) [t](#top-2) [t](#no) <a id='own'></a> [o](#own)\n"
    )
    (tmp_path / "docs" / "a.md").write_text(page)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "b.md").write_text("[x](no.md)\n")
    assert [(found.path, found.line, found.message) for found in links.check(tmp_path)] == [
        ("README.md", 2, golden("scripts.lints.link-docs-gone")),
        ("README.md", 3, golden("scripts.lints.link-gone-heading")),
        ("docs/a.md", 7, golden("scripts.lints.link-gone-md")),
        ("docs/a.md", 10, golden("scripts.lints.link-top-heading")),
        ("docs/a.md", 10, golden("scripts.lints.link-heading-called")),
    ]


@pytest.mark.parametrize(("text", "status"), [("import time\ntime.time()\n", 1), ("import json\n", 0)])
def test_the_command_fails_on_a_planted_tree(tmp_path: Path, text: str, status: int) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "planted.py").write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "scripts.lints"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert f"{status} findings" in done.stdout


def test_sentences_in_assertions_are_counted() -> None:
    text = """
assert text == "four words are counted"
assert "these are four words" in [f"{x} is one of", "three words only"]
with pytest.raises(E, match="this one is counted"): ...
assert run("arguments of calls are not") == 0
"""
    found = sentences.literals([parse("tests/test_x.py", text), parse("src/x.py", text)])
    assert found == [("tests/test_x.py", line) for line in (2, 3, 3, 4)]


def test_pages_are_wrapped_and_name_who_acts(tmp_path: Path) -> None:
    bad = f"# Title\n\nIt is said anew.\n\n{'word ' * 26}\n\n{'x' * 121}\n"
    good = f"# Title\n\nThe server sends it again.\n\n```\n{'code ' * 20}\n```\n\n| {'cell ' * 20}|\n"
    assert len(list(voice.check_page("docs/a.md", bad))) == 5
    assert list(voice.check_page("docs/a.md", good)) == []
    assert list(voice.check_page("docs/decisions/a.md", "It is said anew.\n")) == []
